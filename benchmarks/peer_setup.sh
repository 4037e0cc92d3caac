#!/usr/bin/env bash
# Makes the environment of the peer, `.venv-kvpress` in the repository's root. Run again, it does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venv-kvpress
python="$environment/bin/python"
torch=2.13.0
kvpress=0.5.5

if "$python" -c "
from importlib.metadata import version
assert version('kvpress') == '$kvpress' and version('torch').split('+')[0] == '$torch'
" 2>/dev/null; then
    echo "$environment is ready: kvpress $kvpress, torch $torch"
    exit 0
fi

[ -x "$python" ] || python3 -m venv "$environment"
# torch first and alone: its CPU build is taken where there is one, and nothing after it may change it
# (kvpress's own requirements would otherwise be free to pull a CUDA build with gigabytes of libraries).
"$python" -m pip install "torch==$torch"
constraints="$(mktemp)"
trap 'rm -f "$constraints"' EXIT
"$python" -c "from importlib.metadata import version; print('torch==' + version('torch'))" >"$constraints"
"$python" -m pip install --constraint "$constraints" "kvpress==$kvpress"
"$python" -m pip check
"$python" -c "import kvpress" # fails here rather than in the middle of a benchmark
echo "$environment is ready: kvpress $kvpress, torch $torch"
