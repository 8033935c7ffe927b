#!/usr/bin/env bash
# Some mixers on the small MQAR cell, three seeds each. From the repository's root:
#   experiments/mqar_three_seeds/run.sh [MIXER ..]
# Writes the rows of these mixers anew into rows.csv and leaves those of others.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=experiments/mqar_three_seeds
mixers=("$@")
[ $# -gt 0 ] || mixers=(gated_deltanet deltanet linear_attention)

cargo build --bin train
value() { sed -n "s/^  \"$1\": \"\{0,1\}\([^\",]*\).*/\1/p" "$2"; }

columns=(score steps parameters state_bytes tokens_per_second wall_seconds status device commit)
rows=$here/rows.csv
[ -f "$rows" ] || echo "mixer,seed,$(IFS=,; echo "${columns[*]}")" > "$rows"
for mixer in "${mixers[@]}"; do
    sed -i "/^$mixer,/d" "$rows"
    for seed in 0 1 2; do
        name=${mixer}_$seed
        cargo run -q --bin train -- --config "configs/mqar/$mixer.toml" --device cpu --overwrite \
            --out runs/mqar_three_seeds --set "name=$name" --set "seed=$seed"
        summary=runs/mqar_three_seeds/$name/summary.json
        row=$mixer,$seed
        for column in "${columns[@]}"; do row=$row,$(value "$column" "$summary"); done
        echo "$row" >> "$rows"
    done
done
