"""Training steps of others, with the sizes that `train_step` has by default and those of step.md.

python experiments/speed/step_peers.py model      2 layers of width 128, 256 x 256 tokens, vocabulary 8192: fla, on CUDA
python experiments/speed/step_peers.py deltanet   one DeltaNet layer of width 2048, 8 x 2048 tokens: fla, on CUDA
python experiments/speed/step_peers.py gated_deltanet
python experiments/speed/step_peers.py cpu        the main job's model: PyTorch and transformers, two threads

`model` and the layers take bf16 by autocast, with weights in f32. A step of `model` and of `cpu` is forward pass,
backward pass and AdamW; of a layer it is the two passes. Prints the median, and the tokens of a second.

fla 0.6 refuses its gated backward pass on Hopper with Triton from 3.4 to 3.7, which gives wrong gradients there with
some of the configurations it tries: times of `model` and `gated_deltanet` with --lift are of a pass that may be wrong.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

WARM_UP, STEPS = 10, 40


def times(step, synchronize):
    """Milliseconds of each step, after those that compile and choose."""
    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(STEPS):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def report(name, step, tokens, synchronize):
    took = statistics.median(times(step, synchronize))
    print(f"{name}: {took:.2f} ms a step, {1e3 * tokens / took:.0f} tokens/s", flush=True)


def model_step():
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM

    batch, length, vocab = 256, 256, 8192
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "head_dim": 64}
    losses = {"fuse_cross_entropy": False, "fuse_linear_cross_entropy": True}
    config = GatedDeltaNetConfig(**sizes, **losses, expand_v=1.0, vocab_size=vocab, use_cache=False)
    model = GatedDeltaNetForCausalLM(config).cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = [torch.randint(0, vocab, (batch, length), device="cuda") for _ in range(4)]
    place = iter(range(10**9))

    def step():
        ids = batches[next(place) % 4]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, batch * length


def layer_step(name):
    import fla.layers

    batch, length, width = 8, 2048, 2048
    if name == "deltanet":
        layer = fla.layers.DeltaNet(hidden_size=width, num_heads=16, use_gate=False)
    else:
        layer = fla.layers.GatedDeltaNet(hidden_size=width, num_heads=16, head_dim=128, expand_v=1.0)
    layer = layer.cuda().train()
    x = torch.randn(batch, length, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    d_y = torch.randn_like(x)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = layer(x)[0]
        y.backward(d_y)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return step, batch * length


class Mixer(torch.nn.Module):
    """Gated DeltaNet by the plain rule that transformers has for processors."""

    def __init__(self, width, heads, key, value, chunk):
        super().__init__()
        linear = lambda to: torch.nn.Linear(width, to, bias=False)
        sizes = [heads * key, heads * key, heads * value]
        self.projections = torch.nn.ModuleList(linear(size) for size in sizes)
        convolution = lambda size: torch.nn.Conv1d(size, size, 4, groups=size, padding=3, bias=False)
        self.convolutions = torch.nn.ModuleList(convolution(size) for size in sizes)
        self.beta, self.decay = linear(heads), linear(heads)
        self.a_log = torch.nn.Parameter(2 * torch.rand(heads))
        self.dt_bias = torch.nn.Parameter(torch.rand(heads) - 4)
        self.norm = torch.nn.RMSNorm(value)
        self.out = torch.nn.Linear(heads * value, width, bias=False)
        self.heads, self.chunk = heads, chunk

    def forward(self, x):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        batch, length, _ = x.shape
        rows = []
        for projection, convolution in zip(self.projections, self.convolutions):
            seen = convolution(projection(x).transpose(1, 2))[..., :length]
            rows.append(F.silu(seen).transpose(1, 2).reshape(batch, length, self.heads, -1))
        g = -self.a_log.exp() * F.softplus(self.decay(x) + self.dt_bias)
        options = {"chunk_size": self.chunk, "use_qk_l2norm_in_kernel": True}
        o, _ = torch_chunk_gated_delta_rule(*rows, g=g, beta=self.beta(x).sigmoid(), **options)
        return self.out(self.norm(o).reshape(batch, length, -1))


class Model(torch.nn.Module):
    """The main job's: two layers without an MLP, norms before them, the embedding for the logits."""

    def __init__(self, vocab, width, chunk):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, width)
        self.layers = torch.nn.ModuleList(Mixer(width, 4, 16, 32, chunk) for _ in range(2))
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(3))

    def forward(self, ids, scored):
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        x = self.norms[2](x).flatten(0, 1)[scored]
        return x @ self.embedding.weight.t()


def cpu_step(chunk):
    torch.set_num_threads(2)
    batch, length, vocab, answers = 64, 32, 512, 4
    model = Model(vocab, 64, chunk)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    places = torch.arange(batch * length).view(batch, length)[:, -2 * answers :: 2].reshape(-1)

    def step():
        ids = torch.randint(0, vocab, (batch, length))
        targets = torch.randint(0, vocab, (len(places),))
        loss = F.cross_entropy(model(ids, places), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, batch * length


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("step", choices=["model", "deltanet", "gated_deltanet", "cpu"], nargs="+")
    parser.add_argument("--lift", action="store_true", help="take fla's gated backward pass though fla refuses it")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.lift:
        import fla.ops.common.chunk_o

        fla.ops.common.chunk_o.TRITON_ABOVE_3_7_1 = True
    for name in args.step:
        if name == "cpu":
            for chunk in (32, 64):
                report(f"cpu, chunks of {chunk}", *cpu_step(chunk), lambda: None)
        else:
            step, tokens = model_step() if name == "model" else layer_step(name)
            report(name, step, tokens, torch.cuda.synchronize)


main()
