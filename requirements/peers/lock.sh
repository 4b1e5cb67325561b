#!/usr/bin/env bash
# Resolves the hashed locks of the peers' environments again: requirements/peers/lock.sh UV
# ONNX Runtime and tokenizers are those of Twodoor's own lock, so that peers differ by nothing but their server.
set -euo pipefail
cd "$(dirname "$0")/../.."
uv=$1
flags=(pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header)
same=$(mktemp)
trap 'rm -f "$same"' EXIT
sed -nE 's/^((onnxruntime|tokenizers)==[^ ]+).*/\1/p' requirements/cpu.lock > "$same"
for wanted in requirements/peers/*.in; do
  lock=${wanted%.in}.lock
  "$uv" "${flags[@]}" --no-annotate --constraint "$same" "$wanted" --output-file "$lock" >/dev/null
  if grep -nE '://|^(torch|tensorflow)==' "$lock"; then
    echo "$lock holds an address, or a framework that no peer needs" >&2
    exit 1
  fi
done
