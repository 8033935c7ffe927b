"""GPU time of torch.matmul on the shapes of kernels/examples/matmul, in a CUDA graph over rotated buffers.

python experiments/speed/matmul.py [PART ..]     with torch installed; only rows that contain every PART

The columns are those of the example: the same shapes, layouts and types, with torch for a strategy.
"""

import statistics
import sys

import torch

CALLS, REPLAYS, ROTATED = 24, 11, 150 << 20
INPUTS = {"bf16": torch.bfloat16, "bf16-f32": torch.bfloat16, "tf32": torch.float32}


def layer(rows, inputs, outputs):
    return [(rows, inputs, outputs, "nn"), (rows, outputs, inputs, "nt"), (inputs, rows, outputs, "tn")]


LAYERS = [(16384, 128, 8192), (65536, 128, 520), (65536, 128, 704), (65536, 352, 128), (65536, 128, 128),
          (16384, 2048, 2048), (16384, 2048, 6160), (16384, 2048, 8192), (16384, 128, 520), (16384, 128, 704), (16384, 128, 128), (16384, 352, 128),
          (2048, 64, 272)]


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


def side(rows, columns, transposed, dtype):
    shape = (columns, rows) if transposed else (rows, columns)
    x = torch.rand(shape, device="cuda", dtype=torch.float32).mul_(2).sub_(1).to(dtype)
    return x.t() if transposed else x


def measure(case, types):
    m, k, n, layout = case
    dtype = INPUTS[types]
    out_dtype = torch.bfloat16 if types == "bf16" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = types == "tf32"
    sizes = (m * k + k * n) * dtype.itemsize + m * n * out_dtype.itemsize
    copies = min(max(3, -(-ROTATED // sizes)), CALLS)
    lhs = [side(m, k, layout[0] == "t", dtype) for _ in range(copies)]
    rhs = [side(k, n, layout[1] == "t", dtype) for _ in range(copies)]
    out = [torch.empty((m, n), device="cuda", dtype=out_dtype) for _ in range(copies)]
    mixed = {"out_dtype": out_dtype} if dtype != out_dtype else {}

    def run(n):
        torch.mm(lhs[n], rhs[n], out=out[n], **mixed)

    run(0)
    rows = torch.linspace(0, m - 1, 6, device="cuda").long()
    want = lhs[0][rows, :].double() @ rhs[0].double()
    error = (out[0][rows, :].double() - want).abs().max() / want.square().mean().sqrt()
    return milliseconds(run, copies), error.item()


def main():
    print("shape,layout,types,way,ms,tflops,max_relative_error", flush=True)
    for case in [case for sizes in LAYERS for case in layer(*sizes)]:
        m, k, n, layout = case
        for types in INPUTS:
            key = f"{m}x{k}x{n},{layout},{types},torch"
            if not all(part in key for part in sys.argv[1:]):
                continue
            try:
                took, error = measure(case, types)
            except (RuntimeError, TypeError) as why:
                print(f"{key}: {why}".splitlines()[0], file=sys.stderr)
                continue
            speed = 2 * m * k * n / took / 1e9
            print(f"{key},{took:.4f},{speed:.1f},{error:.1e}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
