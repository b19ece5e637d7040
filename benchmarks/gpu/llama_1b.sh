#!/usr/bin/env bash
# Speed of the default path on the llama3.2-1b shape: bf16-mixed, sequences of 4096, micro-batch 4 and 8, no tuning flags.
#   usage: benchmarks/gpu/llama_1b.sh OUTPUT_FOLDER     (python3 with shoal's dependencies; run from the repository)
set -u
mkdir -p "$1"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" SHOAL_CACHE="$work/cache"
library=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')
cat > "$work/run.yaml" <<YAML
model: {shape: llama3.2-1b, tokenizer: bytes}
data: {source: text, path: "$library/*.py", max_length: 4096, validation: 0}
train: {steps: 40, lr: 1e-4, schedule: {warmup: 10}}
checkpoint: {every: 100000}
log: {every: 10, to: []}
YAML
cd "$work" || exit 1
for size in 4 8; do
  name="micro_batch_$size"
  python3 -m shoal train run.yaml "name=$name" "train.global_batch=$size" "train.micro_batch=$size" 2>&1 | tail -n 2
  cp "runs/$name/metrics.jsonl" "$out/$name.jsonl"
  rm -rf "runs/$name/checkpoints"
done
