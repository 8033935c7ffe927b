#!/bin/sh
# Resident memory of `generate` while it reads a prompt of PROMPT bytes and writes TOKENS, in MiB, every 2 seconds.
# sh experiments/speed/decode_memory.sh PROGRAM-FOLDER PROMPT TOKENS
set -eu
programs=$1 prompt=$2 tokens=$3
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
yes 'a cat sat on a mat, and so on.' | head -c 20000 > "$folder/text.txt"
yes 'a cat sat on a mat, and so on.' | head -c "$prompt" > "$folder/prompt.txt"
cat > "$folder/tiny.toml" <<'TOML'
seed = 3
[task.language_modelling]
train = [{ text = ["text.txt"], length = 64, examples = 800 }]
test = [{ text = ["text.txt"], length = 64, examples = 8 }]
[model]
d_model = 64
[[model.layers]]
repeat = 2
mixer.gated_deltanet = { heads = 2 }
mlp.swiglu = {}
[train]
steps = 100
batch_size = 8
[optimizer]
learning_rate = 5e-3
[evaluate]
every_steps = 100
TOML
cd "$folder"
"$programs/train" --config tiny.toml --device cpu > train.log 2>&1
"$programs/generate" --run runs/tiny --device cpu --prompt-file prompt.txt --tokens "$tokens" --top-k 20 \
    > text.out 2> figures.txt &
writer=$!
echo "seconds,tokens_written,resident_mib"
begun=$(date +%s)
while kill -0 "$writer" 2> /dev/null; do
    resident=$(awk '/^VmRSS/ { printf "%.1f", $2 / 1024 }' "/proc/$writer/status" 2> /dev/null) || break
    [ -n "$resident" ] && echo "$(($(date +%s) - begun)),$(wc -c < text.out),$resident"
    sleep 2
done
wait "$writer"
cat figures.txt >&2
