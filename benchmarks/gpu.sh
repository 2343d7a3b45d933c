#!/usr/bin/env bash
# What a GPU adds to the CPU's checks, under four minutes: exactness of the update phase in float32 and bfloat16, its time
# beside TRL's, rows packed under flash attention where it is installed, and the allocator's peak. Not run by the project yet.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
failed=0
phase() { timeout 75 "$PYTHON" benchmarks/update_phase.py --device cuda --rounds 3 "$@" || failed=1; }
phase --workloads skewed,prompts
phase --workloads skewed,dense,prompts --dtype bfloat16
if "$PYTHON" -c 'import flash_attn' 2>/dev/null; then
    phase --workloads skewed,dense --dtype bfloat16 --attention flash_attention_2
else
    echo "flash_attn is not installed: left out"
fi
timeout 60 "$PYTHON" benchmarks/update_memory.py --device cuda --tokens 4096,16384 || failed=1
exit $failed
