#!/usr/bin/env bash
# Makes the secrets that compose.yaml mounts, where they are missing: random, never printed, the same at a second run.
# The folder is closed to others; the files in it are readable because the containers' users are not the host's.
set -euo pipefail
umask 022
folder=$(dirname "$0")/secrets
mkdir -p "$folder"
chmod 0700 "$folder"
random() { head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n'; }
once() { [[ -e $folder/$1 ]] || { "${@:2}" > "$folder/$1.tmp" && mv "$folder/$1.tmp" "$folder/$1"; }; }
access_key() { random | cut -c1-20 | tr -d '\n'; }
once postgres_password random
once objects_access_key access_key
once objects_secret_key random
# What is made of those: the doors' URL of the database, and the object store's list of who may come in.
# A URL that names another server is the operator's own, and stays.
url=$folder/database_url
if [[ ! -s $url || $(< "$url") == *@postgres:5432/twodoor ]]; then
  printf 'postgresql://twodoor:%s@postgres:5432/twodoor' "$(cat "$folder/postgres_password")" > "$url"
fi
printf '{"identities": [{"name": "twodoor", "credentials": [{"accessKey": "%s", "secretKey": "%s"}], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}\n' \
  "$(cat "$folder/objects_access_key")" "$(cat "$folder/objects_secret_key")" > "$folder/objects_identities"
printf 'secrets: in %s\n' "$folder"
