"""GPU time of flash-linear-attention's chunkwise operations, in a CUDA graph over three copies of the inputs.

python experiments/speed/rival.py OPERATION:BxTxHxD:WHAT ..     with fla, torch and Triton installed
OPERATION is scalar_decay, delta, gated_delta, vector_decay (its GLA), vector_delta (KDA), dplr (RWKV-7), or bounded_dplr,
RWKV-7 with its gates' lower bound told; a shape may end with another width of values, BxTxHxKxV; WHAT is f (forward), b
(forward and backward) or fb.
"""

import statistics
import sys

import torch
import torch.nn.functional as F

COPIES, CALLS, REPLAYS = 3, 12, 15
RWKV7_BOUND = -0.6065306597126334  # -e^(-1/2)


def operation(name):
    if name == "scalar_decay":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda x: chunk_simple_gla(x["q"], x["k"], x["v"], g=x["g"])[0]
    options = {"use_qk_l2norm_in_kernel": True}
    if name == "delta":
        from fla.ops.delta_rule import chunk_delta_rule

        return lambda x: chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"], **options)[0]
    if name == "vector_decay":
        from fla.ops.gla import chunk_gla

        return lambda x: chunk_gla(x["q"], x["k"], x["v"], x["g"])[0]
    if name == "vector_delta":
        from fla.ops.kda import chunk_kda

        return lambda x: chunk_kda(x["q"], x["k"], x["v"], x["g"], x["beta"], **options)[0]
    if name in ("dplr", "bounded_dplr"):
        from fla.ops.rwkv7 import chunk_rwkv7

        bound = {"safe_gate": True, "lower_bound": RWKV7_BOUND} if name == "bounded_dplr" else {}
        named = {"r": "q", "w": "g"} | {row: row for row in "kvab"}
        return lambda x: chunk_rwkv7(**{to: x[row] for to, row in named.items()}, **bound)[0]
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda x: chunk_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["beta"], **options)[0]


def inputs(name, b, t, h, k, v, tracked):
    widths = {"q": k, "k": k, "v": v}
    x = {row: torch.randn(b, t, h, n, device="cuda", dtype=torch.bfloat16) for row, n in widths.items()}
    if name in ("scalar_decay", "gated_delta"):
        x["g"] = F.logsigmoid(torch.randn(b, t, h, device="cuda")) / 4
    elif name in ("vector_decay", "vector_delta"):
        x["g"] = F.logsigmoid(torch.randn(b, t, h, k, device="cuda")) / 4
    elif name in ("dplr", "bounded_dplr"):
        direction = F.normalize(torch.randn(b, t, h, k, device="cuda"), dim=-1)
        x["g"] = (RWKV7_BOUND * torch.sigmoid(torch.randn(b, t, h, k, device="cuda"))).to(torch.bfloat16)
        x["a"] = -direction.to(torch.bfloat16)
        x["b"] = (direction * torch.rand(b, t, h, k, device="cuda")).to(torch.bfloat16)
    if name in ("delta", "gated_delta", "vector_delta"):
        x["beta"] = torch.rand(b, t, h, device="cuda").to(torch.bfloat16)
    return {key: value.requires_grad_(tracked) for key, value in x.items()}


def milliseconds(run):
    # Triton tries its configurations on the first calls, which a graph cannot hold.
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for n in range(COPIES):
            run(n)
    torch.cuda.current_stream().wait_stream(aside)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for n in range(CALLS):
            run(n % COPIES)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    return statistics.median(times)


def main():
    for spec in sys.argv[1:]:
        name, shape, what = spec.split(":")
        b, t, h, *widths = map(int, shape.split("x"))
        k, v = widths[0], widths[-1]
        call = operation(name)
        if "f" in what:
            copies = [inputs(name, b, t, h, k, v, False) for _ in range(COPIES)]
            with torch.no_grad():
                took = milliseconds(lambda n: call(copies[n]))
            print(f"{name} {shape} forward {took:.4f} ms", flush=True)
        if "b" in what:
            copies = [inputs(name, b, t, h, k, v, True) for _ in range(COPIES)]
            d_o = torch.randn(b, t, h, v, device="cuda", dtype=torch.bfloat16)

            def both(n):
                for value in copies[n].values():
                    value.grad = None
                call(copies[n]).backward(d_o)

            print(f"{name} {shape} forward and backward {milliseconds(both):.4f} ms", flush=True)


main()
