"""GPU time of torch.matmul on the shapes of kernels/examples/matmul, in a CUDA graph over rotated buffers.

python experiments/speed/matmul.py [PART ..]     with torch installed; only rows that contain every PART

The columns are those of the example: the same shapes, layouts and types, with torch for a strategy.
"""

import statistics
import sys

import torch

CALLS, REPLAYS, ROTATED = 24, 11, 150 << 20
INPUTS = {"bf16": torch.bfloat16, "bf16-f32": torch.bfloat16, "tf32": torch.float32, "f32": torch.float32}


def y(rows, inputs, outputs):
    return (1, rows, inputs, outputs, "nn")


def layer(rows, inputs, outputs, slices):
    d_x = (1, rows, outputs, inputs, "nt")
    return [y(rows, inputs, outputs), d_x, d_w(rows, inputs, outputs, slices)]


def d_w(rows, inputs, outputs, slices):
    return (slices, inputs, rows // slices, outputs, "tn")


def cases():
    every = layer(65536, 128, 516, 64) + layer(65536, 128, 704, 32) + layer(65536, 352, 128, 64)
    every += layer(16384, 128, 8192, 2) + layer(16384, 2048, 2048, 1) + layer(16384, 2048, 8192, 1)
    every += [d_w(16384, 128, 8192, slices) for slices in (1, 4, 8)]
    every += layer(16384, 128, 516, 32) + layer(16384, 128, 704, 32) + layer(2048, 64, 270, 32)
    every += [d_w(2048, 64, 270, slices) for slices in (1, 4, 16, 64, 128)]
    # Torch splits K by itself: one product is what it would be asked for.
    every += [d_w(rows, inputs, outputs, 1) for rows, inputs, outputs in
            ((65536, 128, 516), (65536, 128, 704), (65536, 352, 128), (16384, 128, 516), (16384, 128, 704))]
    return every


def milliseconds(run, copies):
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for n in range(copies):
            run(n)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(CALLS):
            run(n % copies)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def side(batch, rows, columns, transposed, dtype):
    shape = (batch, columns, rows) if transposed else (batch, rows, columns)
    x = torch.rand(shape, device="cuda", dtype=torch.float32).mul_(2).sub_(1).to(dtype)
    x = x.transpose(1, 2) if transposed else x
    return x[0] if batch == 1 else x


def measure(case, types):
    batch, m, k, n, layout = case
    dtype = INPUTS[types]
    out_dtype = torch.bfloat16 if types == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = types == "tf32"
    sizes = batch * (m * k + k * n) * dtype.itemsize + batch * m * n * out_dtype.itemsize
    copies = min(max(3, -(-ROTATED // sizes)), CALLS)
    lhs = [side(batch, m, k, layout[0] == "t", dtype) for _ in range(copies)]
    rhs = [side(batch, k, n, layout[1] == "t", dtype) for _ in range(copies)]
    shape = (m, n) if batch == 1 else (batch, m, n)
    out = [torch.empty(shape, device="cuda", dtype=out_dtype) for _ in range(copies)]
    multiply = torch.mm if batch == 1 else torch.bmm
    mixed = {"out_dtype": out_dtype} if dtype != out_dtype else {}

    def run(n):
        multiply(lhs[n], rhs[n], out=out[n], **mixed)

    run(0)
    rows = torch.linspace(0, m - 1, 6, device="cuda").long()
    want = lhs[0][..., rows, :].double() @ rhs[0].double()
    error = (out[0][..., rows, :].double() - want).abs().max() / want.square().mean().sqrt()
    return milliseconds(run, copies), error.item()


def main():
    print("shape,layout,types,strategy,ms,tflops,max_relative_error", flush=True)
    for case in cases():
        batch, m, k, n, layout = case
        name = f"{m}x{k}x{n}" + (f"b{batch}" if batch > 1 else "")
        for types in INPUTS:
            key = f"{name},{layout},{types},torch"
            if (batch > 1 and types == "bf16") or not all(part in key for part in sys.argv[1:]):
                continue
            try:
                took, error = measure(case, types)
            except (RuntimeError, TypeError) as why:
                print(f"{key}: {why}".splitlines()[0], file=sys.stderr)
                continue
            speed = 2 * batch * m * k * n / took / 1e9
            print(f"{key},{took:.4f},{speed:.1f},{error:.1e}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
