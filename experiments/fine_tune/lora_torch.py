"""The run of lora.toml in PyTorch and transformers: same weights, same windows of text, adapters written by hand.

python experiments/fine_tune/lora_torch.py CHECKPOINT [--base f32|bf16] [--seconds N] [--steps N] [--json FILE]
                                             [--device DEVICE] [--plain]
From the repository's root, with torch and transformers installed. f32 is what `train` does: weights and residual
stream in f32, products in bf16. With `--base bf16` frozen weights and residual stream are bf16, adapters f32.
After so many seconds no further step starts. With `--plain` flash-linear-attention counts as not installed.
"""

import argparse
import inspect
import json
import math
import struct
import sys
import time
import tomllib
from pathlib import Path

if "--plain" in sys.argv:
    sys.modules["fla"] = None  # before transformers looks for it

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

HERE = Path(__file__).parent
TARGETS = {"q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
WARM_UP = 10
MASK = 0xFFFFFFFF


# Text: bytes, and the windows that `train` draws.


def rotated(x, n):
    return ((x << n) | (x >> (32 - n))) & MASK


def chacha8(key, stream):
    """The first 16 words of a stream, as Rust's rand_chacha draws them."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *key, 0, 0, stream & MASK, stream >> 32]
    x = list(start)
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for a, b, c, d in 4 * (columns + diagonals):
        for to, more, turned, n in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)]:
            x[to] = (x[to] + x[more]) & MASK
            x[turned] = rotated(x[turned] ^ x[to], n)
    return [(u + v) & MASK for u, v in zip(x, start)]


def draw(below, seed, index):
    """Where the window `index` starts, as the task `language_modelling` and Rust's rand 0.9 have it."""
    key = struct.unpack("<8I", b"language" + struct.pack("<3Q", seed, 0, 0))
    words = chacha8(key, index)
    high, low = divmod(words[0] * below, 1 << 32)
    if low > (1 << 32) - below:
        high += low + (words[1] * below >> 32) > MASK
    return high


def read(paths):
    return torch.tensor(list(b"".join(Path(path).read_bytes() for path in paths)))


def windows(text, starts, length):
    return torch.stack([text[start : start + length + 1] for start in starts])


class Texts:
    """Batches by step, and the test."""

    def __init__(self, run):
        task = run["task"]["language_modelling"]
        [train], [test] = task["train"], task["test"]
        assert run["train"]["order"] == "fixed"
        self.seed, self.batch, self.length = run["seed"], run["train"]["batch_size"], train["length"]
        self.text = read(train["text"])
        starts = [n * test["length"] for n in range(test["examples"])]
        self.test = windows(read(test["text"]), starts, test["length"])

    def at(self, step):
        below = len(self.text) - self.length
        indices = range(step * self.batch, (step + 1) * self.batch)
        return windows(self.text, [draw(below, self.seed, index) for index in indices], self.length)


# Adapters.


class Adapted(torch.nn.Module):
    """x W + (alpha / r) (x A) B, with an A and a B for each part of W's columns.

    Each of `heads` heads has its columns of all parts, one part after another.
    """

    def __init__(self, base, widths, lora, heads=1):
        super().__init__()
        rank, bound, device = lora["rank"], base.in_features**-0.5, base.weight.device
        a = torch.empty(len(widths) * rank, base.in_features, device=device).uniform_(-bound, bound)
        self.base, self.heads, self.scale = base, heads, lora["alpha"] / rank
        self.a = torch.nn.Parameter(a)
        self.b = torch.nn.ParameterList(torch.zeros(width, rank, device=device) for width in widths)

    def forward(self, x):
        inner = (F.linear(x, self.a) * self.scale).chunk(len(self.b), -1)
        parts = [F.linear(part, b) for part, b in zip(inner, self.b)]
        if len(parts) == 1:
            return self.base(x) + parts[0]
        parts = [part.unflatten(-1, (self.heads, -1)) for part in parts]
        return self.base(x) + torch.cat(parts, -1).flatten(-2)


def adapt(model, lora):
    """Puts adapters where lora.toml has them, and leaves them alone to learn.

    Queries, keys and values of a linear layer are one matrix here, and so are queries and gates of attention.
    """
    assert set(lora["targets"]) == TARGETS, "other targets are not known here"
    model.requires_grad_(False)
    c = model.config
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    queries = c.num_attention_heads * c.head_dim
    several = {"in_proj_qkv": ([keys, keys, values], 1), "q_proj": ([queries, queries], c.num_attention_heads)}
    one = TARGETS | {"in_proj_z", "out_proj"}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in several:
                widths, heads = several[name]
                setattr(parent, name, Adapted(child, widths, lora, heads))
            elif name in one:
                setattr(parent, name, Adapted(child, [child.out_features], lora))
    return [p for p in model.parameters() if p.requires_grad]


# Training.


def gated_delta_path():
    """What computes the gated delta rule."""
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    found = inspect.getclosurevars(rule).nonlocals.get("implementation", rule)
    plain = found.__module__ == modeling_qwen3_5.__name__
    return "plain PyTorch" if plain else f"{found.__module__}.{found.__name__}"


def rate(run, step):
    """The learning rate of a step, from 0, as a share of the highest."""
    schedule = run["schedule"]
    assert schedule["shape"] == "cosine"
    warm_up, steps = schedule["warmup_steps"], run["train"]["steps"]
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


class Trial:
    def __init__(self, args, run):
        self.run, self.device, self.texts = run, args.device, Texts(run)
        dtype = torch.float32 if args.base == "f32" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=dtype).to(args.device)
        torch.manual_seed(run["seed"])
        self.learnt = adapt(self.model, run["train"]["lora"])
        if run["train"]["checkpoint_activations"]:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        adam = run["optimizer"]
        self.optimizer = torch.optim.AdamW(
            self.learnt, lr=adam["learning_rate"], weight_decay=adam["weight_decay"], fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(run, step))

    def loss(self, rows):
        rows = rows.to(self.device)
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    def test(self):
        self.model.eval()
        with torch.no_grad():
            losses = [self.loss(row[None]).item() for row in self.texts.test]
        self.model.train()
        return sum(losses) / len(losses)

    def step(self, step):
        train = self.run["train"]
        parts = self.texts.at(step).chunk(train["accumulate"])
        total = 0.0
        for part in parts:
            loss = self.loss(part) / len(parts)
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(self.learnt, train["clip_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total.item()


def mebibytes(what):
    return round(what() / 2**20) if torch.cuda.is_available() else None


def go(args):
    began = time.perf_counter()
    run = tomllib.loads((HERE / "lora.toml").read_text())
    trial = Trial(args, run)
    parameters = sum(p.numel() for p in trial.model.parameters())
    learnt = sum(p.numel() for p in trial.learnt)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.base} weights on {args.device}")
    print(f"gated delta rule: {gated_delta_path()}")
    print(f"{parameters} parameters, {learnt} of them learnt")
    before = trial.test()
    print(f"test loss {before:.4f}", flush=True)
    losses, clock = [], []
    for step in range(min(run["train"]["steps"], args.steps)):
        if time.perf_counter() - began > args.seconds:
            print("no time for more steps")
            break
        losses.append(trial.step(step))
        clock.append(time.perf_counter())
        if step == 0 or (step + 1) % 10 == 0:
            print(f"step {step + 1}, loss {losses[-1]:.4f}, {clock[-1] - began:.1f} s", flush=True)
    # Where there was no time for more, the first step alone is left out.
    from_step = WARM_UP if len(clock) > WARM_UP else 1
    tokens = (len(clock) - from_step) * trial.texts.batch * trial.texts.length
    speed = tokens / (clock[-1] - clock[from_step - 1]) if tokens > 0 else None
    return {
        "base": args.base,
        "gated_delta_rule": gated_delta_path(),
        "learnt": learnt,
        "test_before": before,
        "test": trial.test(),
        "losses": losses,
        "from_step": from_step,
        "tokens_per_second": speed,
        "allocated_mib": mebibytes(torch.cuda.max_memory_allocated),
        "reserved_mib": mebibytes(torch.cuda.max_memory_reserved),
        "seconds": time.perf_counter() - began,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--base", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    result = go(args)
    print(f"test loss {result['test']:.4f}, {result['tokens_per_second'] or 0:.0f} tokens/s after step "
          f"{result['from_step']}, at most {result['allocated_mib']} MiB allocated, "
          f"{result['reserved_mib']} reserved, {result['seconds']:.1f} s")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
