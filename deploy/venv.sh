#!/usr/bin/env bash
# Makes one virtual environment from a hashed lock: venv.sh PYTHON FOLDER LOCK
set -euo pipefail
python=$1 folder=$2 lock=$3
say() { printf '%s\n' "$*" >&2; }
if [[ -z $python ]]; then
  say "setup: no Python found; install Python 3.11, 3.12 or 3.13"
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 13)))'; then
  say "setup: $("$python" --version) is not supported; install Python 3.11, 3.12 or 3.13, or name it: make PYTHON=… setup"
  exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    say "setup: Python's venv module is missing; installing python3-venv"
    apt-get install -y -qq python3-venv >/dev/null
  else
    say "setup: Python's venv module is missing; on Debian or Ubuntu: sudo apt-get install python3-venv"
    exit 1
  fi
fi
[[ -x $folder/bin/python ]] || "$python" -m venv "$folder"
# Fetched first and installed from there, so that the time of the network and that of this machine are told apart.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
started_s=$SECONDS
"$folder/bin/python" -m pip download --quiet --no-deps --require-hashes --requirement "$lock" --dest "$wheels"
fetched_s=$SECONDS
"$folder/bin/python" -m pip install --quiet --no-deps --no-index --find-links "$wheels" --require-hashes --requirement "$lock"
say "setup: $folder ready: $((fetched_s - started_s)) s download time, $((SECONDS - fetched_s)) s installation"
