#!/usr/bin/env bash
# Checks that shoal runs on this CUDA device: trains the pythia-160m shape in every precision, resumes, and prints the metrics.
#   usage: benchmarks/gpu/first_light.sh OUTPUT_FOLDER     (python3 with shoal's dependencies; run from the repository)
set -u
out=$1
mkdir -p "$out"
work=$(mktemp -d)
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" SHOAL_CACHE="$work/cache"
library=$(python3 -c 'import os; print(os.path.dirname(os.__file__))')
cat > "$work/run.yaml" <<YAML
name: pythia-160m
model: {shape: pythia-160m, tokenizer: bytes}
data: {source: text, path: "$library/*.py", max_length: 2048, validation: 0.02}
train: {steps: 60, global_batch: 16, micro_batch: 16, lr: 6e-4, schedule: {warmup: 10}}
eval: {every: 1000, batches: 2}
checkpoint: {every: 1000}
log: {every: 10, to: []}
YAML
cd "$work" || exit 1
try() { # name, overrides…
  local name=$1; shift
  echo "== $name: $*"
  python3 -m shoal train run.yaml "name=$name" "$@" --json > "$out/$name.json" 2> "$work/$name.log"
  local status=$?
  echo "exit $status"; tail -n 4 "$work/$name.log"
  [ -f "runs/$name/metrics.jsonl" ] && cp "runs/$name/metrics.jsonl" "$out/$name.metrics.jsonl"
}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 - "$out/machine.json" <<PY
import datetime, json, platform, sys
import torch, transformers
properties = torch.cuda.get_device_properties(0)
machine = {
    "device": f"{properties.name}, {properties.total_memory >> 20} MiB",
    "python": platform.python_version(),
    "torch": torch.__version__,
    "transformers": transformers.__version__,
    "script": "benchmarks/gpu/first_light.sh",
    "date": datetime.date.today().isoformat(),
}
print(machine)
json.dump(machine, open(sys.argv[1], "w"), indent=2)
PY
try bf16-mixed
try bf16-mixed-eager train.compile=false
try bf16-true train.precision=bf16-true train.steps=30
try fp16-mixed train.precision=16-mixed train.steps=30
try fp32 train.precision=32-true train.steps=20
for optimizer in sgd lion muon; do try "$optimizer" "train.optimizer.name=$optimizer" train.steps=20 train.lr=1e-4; done
try whole train.deterministic=true train.compile=false train.steps=20 checkpoint.every=10 checkpoint.keep=5
cp -r runs/whole runs/resumed && rm -r runs/resumed/checkpoints/step-00000020 && : > runs/resumed/metrics.jsonl
python3 -m shoal train run.yaml name=resumed train.deterministic=true train.compile=false train.steps=20 checkpoint.every=10 checkpoint.keep=5 --resume 2>&1 | tail -n 3
python3 - <<'PY'
import json
last = lambda run: json.loads(open(f"runs/{run}/metrics.jsonl").read().splitlines()[-2])
one, other = last("whole"), last("resumed")
print("the resumed run equals the uninterrupted one:", one["step"], (one["loss"], one["grad_norm"]) == (other["loss"], other["grad_norm"]))
PY
try llama-1b model.shape=llama3.2-1b data.max_length=4096 train.global_batch=4 train.micro_batch=4 train.steps=30 data.validation=0
