#!/bin/bash
# Verify and time the schedules on one GPU, in eight minutes and without a network: docs/gpus.md.
#
#     benchmarks/gpu_check.sh                  # on a GPU; results in gpu_check/
#     benchmarks/gpu_check.sh --minutes 20     # everything there is, compiled models included
#     benchmarks/gpu_check.sh --tiny           # the same code on narrow models, without a GPU
#
# Takes the python of PYTHON, of an active environment, of this repository's .venv, or of the path,
# whichever is first and has leangrpo.

set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=""
for one in "${PYTHON:-}" "${VIRTUAL_ENV:-/nowhere}/bin/python" "$here/../.venv/bin/python" python3; do
    if [ -n "$one" ] && "$one" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('leangrpo'))" 2> /dev/null; then
        python=$one
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no python with leangrpo: run \`make demo\` first, or name one in PYTHON." >&2
    exit 2
fi
echo "python: $python"
if command -v nvidia-smi > /dev/null; then
    nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv || true
fi
exec "$python" "$here/gpu_check.py" "$@"
