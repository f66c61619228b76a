#!/bin/sh
# The demo: train, export, generate. Only public commands; `make demo` runs it. A second run starts a folder of its own.
set -eu
cd "$(dirname "$0")/.."
run=runs/demo
n=2
while [ -e "$run" ]; do run=runs/demo-$n; n=$((n + 1)); done
mkdir -p runs
workers=2                                         # on CPU; with GPUs as many as divide the 8 sequences of a step
if command -v nvidia-smi >/dev/null 2>&1 && gpus=$(nvidia-smi -L 2>/dev/null | wc -l) && [ "$gpus" -gt 0 ]; then
  for workers in 8 4 2 1; do if [ "$workers" -le "$gpus" ]; then break; fi; done
fi
shardwise train examples/demo.yaml --workers "$workers" --set run_dir="$run" --json > runs/last-demo.json
shardwise export "$run" "$run/export"
echo
echo "text made by plain transformers from $run/export:"
python examples/generate.py "$run/export" "ROMEO."
echo
python - <<PY
import json
s = json.load(open("runs/last-demo.json"))
mib = lambda b: f"{b / 2**20:.1f} MiB"
print(f"validation loss  {s['validation_loss']:.3f}, {s['validation_loss'] / s['untrained_validation_loss']:.0%} of the untrained {s['untrained_validation_loss']:.3f}")
print(f"peak a rank      predicted {mib(s['predicted_peak_allocated_bytes'])}, measured {', '.join(map(mib, s['measured_peak_allocated_bytes']))}")
print("export           $run/export")
PY
