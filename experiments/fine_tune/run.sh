#!/usr/bin/env bash
# 50 steps of low-rank adapters on a model of 0.8 billion random weights, by `train` and by PyTorch, in nine minutes.
# From the repository's root:
#   SWEEP=target/release/sweep CONVERT=target/release/convert bash experiments/fine_tune/run.sh OUT [--tiny]
# OUT is a folder for logs and numbers; weights go into a folder of their own that is removed. DEVICE, cuda:0 unless
# given, is where it runs; --tiny takes a tiny model, for a look at this script.
set -uo pipefail
sweep=${SWEEP:?the program sweep} convert=${CONVERT:?the program convert}
out=${1:?a folder for logs and numbers} tiny=${2:-} device=${DEVICE:-cuda:0}
here=experiments/fine_tune
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
: > "$out/log.txt"
until=525 # seconds, of 540

# Keeps the largest memory in use on the GPU, in MiB, in file $1 for as long as there is a file $work/watched.
watch_memory() {
    local most=0 now
    while [ -e "$work/watched" ]; do
        now=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits -i 0 2> /dev/null | head -n 1)
        if [ "${now:-0}" -gt "$most" ] 2> /dev/null; then
            most=$now
            echo "$most" > "$1"
        fi
        sleep 0.5
    done
}

# part NAME SECONDS COMMAND ..: runs it for no longer than that, nor than is left of all. Its output goes to the log.
part() {
    local name=$1 limit=$2 left=$((until - SECONDS)) began=$SECONDS status watcher
    shift 2
    [ "$limit" -lt "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "== $name: no time left"
        return 1
    fi
    touch "$work/watched"
    watch_memory "$work/$name.mib" &
    watcher=$!
    # An interrupt ends `train` after a step, with what it has.
    timeout --signal=INT --kill-after=8 "$limit" "$@" > "$work/$name.log" 2>&1
    status=$?
    rm -f "$work/watched"
    wait "$watcher"
    echo "== $name: exit code $status, $((SECONDS - began)) s, $(cat "$work/$name.mib" 2> /dev/null || echo 0) MiB"
    tail -n 12 "$work/$name.log"
    { echo "== $name: exit code $status, $((SECONDS - began)) s"; tail -c 100000 "$work/$name.log"; } >> "$out/log.txt"
    return "$status"
}

run=(train --config "$here/lora.toml" --set "model.from=$work/base" --out "$work/runs")

# PyTorch with weights of type $1, and what it needs to start and to end beside its steps.
by_torch() {
    local left=$((until - SECONDS))
    part "torch_$1" "$left" python3 -u "$here/lora_torch.py" "$work/checkpoint" --base "$1" --device "$device" \
        --seconds "$((left - 30))" --json "$out/torch_$1.json" "${@:2}"
}

part checkpoint 60 python3 "$here/make_checkpoint.py" "$work/checkpoint" $tiny
part import 60 "$convert" import "$work/checkpoint" --out "$work/base"
part dry_run 30 "$sweep" "${run[@]}" --device cpu --dry-run
part linattn "$((until - SECONDS > 380 ? 300 : until - SECONDS - 80))" \
    "$sweep" "${run[@]}" --device "$device" --progress lines
cp "$work/runs/lora/metrics.jsonl" "$work/runs/lora/summary.json" "$out/" 2> /dev/null
# flash-linear-attention refuses its backward pass with some versions of Triton.
by_torch f32 || by_torch f32 --plain
[ $((until - SECONDS)) -lt 50 ] || by_torch bf16 || by_torch bf16 --plain

python3 - "$out" "$work" "$here/lora.toml" <<'PY' | tee "$out/summary.txt"
import json
import sys
import tomllib
from pathlib import Path

out, work, config = map(Path, sys.argv[1:])
run = tomllib.loads(config.read_text())
step_tokens = run["train"]["batch_size"] * run["task"]["language_modelling"]["train"][0]["length"]


def peak(name):
    file = work / f"{name}.mib"
    return int(file.read_text()) if file.exists() else None


def ours():
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    spent = [line["step"] * step_tokens / line["tokens_per_second"] for line in steps]
    first = 10 if len(steps) > 10 else 1
    tests = [line["test/loss"] for line in lines if line["kind"] == "evaluation"]
    return {
        "losses": [line["loss"] for line in steps],
        "test": tests[-1] if tests else None,
        "tokens_per_second": (len(steps) - first) * step_tokens / (spent[-1] - spent[first - 1]),
        "seconds": lines[-1]["seconds"],
    }


def row(name, read):
    try:
        found = read()
    except (OSError, ValueError, LookupError, ArithmeticError) as why:
        return [name, f"failed: {why!r}"]
    losses = found["losses"]
    values = [losses[0], losses[min(9, len(losses) - 1)], losses[-1], found["test"]]
    shown = [f"{value:.4f}" if value is not None else "" for value in values]
    speed = found["tokens_per_second"]
    return [name, len(losses), *shown, f"{speed:.0f}" if speed else "", peak(name) or "",
            found.get("allocated_mib") or "", f"{found['seconds']:.0f}"]


def torch(base):
    return lambda: json.loads((out / f"torch_{base}.json").read_text())


head = ["who", "steps", "loss 1", "loss 10", "last", "test", "tokens/s", "peak MiB", "allocated MiB", "seconds"]
rows = [row("linattn", ours), row("torch_f32", torch("f32")), row("torch_bf16", torch("bf16"))]
for line in [head, ["---"] * len(head), *rows]:
    print("| " + " | ".join(map(str, line)) + " |")
PY
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | tee -a "$out/summary.txt"
echo "all of it: $SECONDS s" | tee -a "$out/summary.txt"
