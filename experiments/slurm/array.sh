#!/usr/bin/env bash
# One sweep as a Slurm job array: each job does its share of the runs, into one shared folder.
#
#   cargo build --release --features cuda --bin sweep      # once, on a node with the same system
#   sbatch experiments/slurm/array.sh experiments/NAME/sweep.toml
#
# Change for your cluster: the lines below, and `module load` or the like before the command. The array's
# size is the number of shards; a job that is killed or runs out of time can be sent again, it goes on
# where it stopped. Jobs need no word from each other: rows are added under a lock in the sweep's folder,
# so that folder has to be on a file system that all nodes share and that knows locks (NFS 4, Lustre with
# `flock`). Where there is none, give each job a copy of the folder and join the rows afterwards:
#   target/release/sweep --config experiments/NAME/sweep.toml --join OTHER/rows.csv
#SBATCH --job-name=linattn-sweep
#SBATCH --array=1-8
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --gres=gpu:1
#SBATCH --time=04:00:00
#SBATCH --signal=B:INT@300
#SBATCH --output=%x-%A-%a.log
set -euo pipefail

config="${1:?the sweep.toml}"
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

# Five minutes before the end Slurm sends SIGINT: runs at work are given the time that is left, then
# saved. Children have to get it from here.
target/release/sweep --config "$config" --devices cuda:0 \
    --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" &
sweep=$!
trap 'kill -INT "$sweep"; sleep 200; kill -INT "$sweep"' INT
status=0
while kill -0 "$sweep" 2>/dev/null; do
    wait "$sweep" && status=0 || status=$? # a signal ends the wait, not the sweep
done
exit "$status"
