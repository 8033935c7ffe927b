"""Milliseconds a token of a Gated DeltaNet with random weights, decoded alone by plain PyTorch on the CPU.

python experiments/speed/decode_torch.py [--type f32|bf16] [--compile]     with torch installed
The model is decode_speed's with `--layers 12 --width 768 --mixer "gated_deltanet = { heads = 6, expand_v = 1.0 }"`:
embedding tied to the output, RMSNorm before each sublayer, short convolutions of 4, an output gate, SwiGLU.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, VOCAB, INNER, WINDOW = 12, 768, 6, 32_000, 2048, 4


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH, eps=1e-5) for _ in range(2))
        self.qkvg = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.gates = torch.nn.Linear(WIDTH, 2 * HEADS, bias=False)
        self.taps = torch.nn.Parameter(torch.randn(3 * WIDTH, WINDOW) / 2)
        self.log_a = torch.nn.Parameter(torch.zeros(HEADS))
        self.dt_bias = torch.nn.Parameter(torch.zeros(HEADS))
        self.head_norm = torch.nn.RMSNorm(WIDTH // HEADS, eps=1e-5)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = torch.nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, memory, tail):
        y = self.norms[0](x)
        qkv, gate = self.qkvg(y).split([3 * WIDTH, WIDTH], -1)
        tail = torch.cat([tail[:, 1:], qkv.unsqueeze(-1)], -1)
        q, k, v = F.silu((tail * self.taps).sum(-1)).view(3, HEADS, -1)
        q, k = F.normalize(q, dim=-1) * q.shape[-1] ** -0.5, F.normalize(k, dim=-1)
        dt, beta = self.gates(y).view(2, HEADS)
        decay = torch.exp(-self.log_a.exp() * F.softplus(dt + self.dt_bias))
        memory = memory * decay[:, None, None]
        error = (v - torch.einsum("hk,hkv->hv", k, memory)) * beta.sigmoid()[:, None]
        memory = memory + k[:, :, None] * error[:, None, :]
        o = self.head_norm(torch.einsum("hk,hkv->hv", q, memory)).flatten()
        x = x + self.out(o * F.silu(gate))
        a, b = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(a) * b), memory, tail


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, token, states):
        x, after = self.embedding(token), []
        for layer, (memory, tail) in zip(self.layers, states):
            x, memory, tail = layer(x, memory, tail)
            after.append((memory, tail))
        return F.linear(self.norm(x), self.embedding.weight).argmax(), after


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--type", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=45)
    args = parser.parse_args()
    dtype = torch.float32 if args.type == "f32" else torch.bfloat16
    model = Model().to(dtype).eval()
    step = torch.compile(model) if args.compile else model
    width = WIDTH // HEADS
    states = [(torch.zeros(HEADS, width, width, dtype=dtype), torch.zeros(3 * WIDTH, WINDOW, dtype=dtype))
              for _ in range(LAYERS)]
    token, times = torch.tensor(1), []
    with torch.inference_mode():
        for n in range(2 * args.steps):
            start = time.perf_counter()
            token, states = step(token, states)
            if n >= args.steps:
                times.append((time.perf_counter() - start) * 1e3)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.type}"
          f"{', compiled' if args.compile else ''}: {parameters} parameters, "
          f"{statistics.median(times):.2f} ms a token, least {min(times):.2f}")


main()
