#!/usr/bin/env bash
# Makes the secrets that compose.yaml's profile `jobs` mounts, where they are missing: random, never printed.
# The folder is closed to others; the files in it are readable because the containers' users are not the host's.
set -euo pipefail
umask 022
folder=$(dirname "$0")/secrets
mkdir -p "$folder"
chmod 0700 "$folder"
random() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
if [[ ! -e $folder/postgres_password ]]; then
  random > "$folder/postgres_password"
fi
if [[ ! -e $folder/objects_identities ]]; then
  printf '{"identities": [{"name": "twodoor", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' \
    "$(random | cut -c1-20)" "$(random)" > "$folder/objects_identities"
fi
printf 'secrets: in %s\n' "$folder"
