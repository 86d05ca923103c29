#!/usr/bin/env bash
# Makes a virtual environment and installs this project into it, torch first.
# Usage: scripts/setup.sh VENV
#   PYTHON           interpreter to use (python3)
#   TORCH            requirement for torch (below)
#   TORCH_INDEX_URL  package index for torch alone, e.g. PyTorch's own index of CPU builds
set -euo pipefail
venv=${1:?usage: scripts/setup.sh VENV}
python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    echo "error: $python is $("$python" --version 2>&1), the project needs Python 3.11 to 3.13" >&2
    echo >&2
    echo "hint: name another interpreter, e.g. \`PYTHON=python3.12 make setup\`" >&2
    exit 69
fi
"$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)
# Installed before anything that depends on it: a range would take whatever build is newest.
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    if [ -z "${TORCH:-}" ]; then
        if nvidia-smi >/dev/null 2>&1; then TORCH='torch>=2.11,<2.14'; else TORCH='torch==2.13.0'; fi
    fi
    echo "installing $TORCH" >&2
    "${pip[@]}" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH"
fi
echo "installing dflash-aot with its demo and dev extras" >&2
"${pip[@]}" --editable '.[demo,dev]'
