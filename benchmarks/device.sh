#!/usr/bin/env bash
# Everything that needs a GPU in one call: kernels against the reference, then the timings. Logs and JSON go to $OUT.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
out=${OUT:-benchmarks/results}
mkdir -p "$out"
timeout 200 python3 -m pytest -q -n 12 -m gpu -p no:cacheprovider --maxfail 30 tests/kernels/test_gpu.py 2>&1 | tail -80 | tee "$out/gpu_kernels.log"
timeout 60 python3 benchmarks/quantize.py --sweep 2>&1 | tee "$out/quantize.log"
timeout 100 python3 benchmarks/linear.py --stages 2>&1 | tee "$out/linear.log"
timeout 130 python3 -m pytest -q -n 12 -m gpu -p no:cacheprovider --maxfail 10 tests/test_ops.py tests/test_matmul.py tests/test_linear.py 2>&1 | tail -40 | tee "$out/gpu_layers.log"
cp benchmarks/results/{quantize,linear}.json "$out/" 2>/dev/null
echo "kernels: $(tail -1 "$out/gpu_kernels.log")"
echo "layers: $(tail -1 "$out/gpu_layers.log")"
