#!/usr/bin/env bash
# Resolves the hashed locks again. They hold no download address, so that they serve behind any index: lock.sh UV
set -euo pipefail
cd "$(dirname "$0")/.."
uv=$1
flags=(pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header)
"$uv" "${flags[@]}" --extra server --extra local --group dev pyproject.toml --output-file requirements/cpu.lock >/dev/null
"$uv" "${flags[@]}" --extra server --constraint requirements/cpu.lock pyproject.toml --output-file requirements/server.lock >/dev/null
"$uv" "${flags[@]}" --no-deps requirements/triton.in --output-file requirements/triton.lock >/dev/null
