#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The cases of benches/serve/README.md. KVPUSH is the command, RATE the shaped link's rate, REQUESTS how many requests a case sends
# to each connector, ARGS more options for all.
set -euo pipefail

out=${1:?usage: targets.sh OUT_DIR [CASE ...]}
shift
cases=("$@")
[ ${#cases[@]} -gt 0 ] || cases=(short load shaped shaped-load)
kvpush=${KVPUSH:-kvpush}
rate=${RATE:-350mbit}
requests=${REQUESTS:-12}
all=(--connector kvpush --connector nixl-push --connector nixl-push:concurrent --connector nixl-pull)
mkdir -p "$out"
failed=0

bench() {
  local name=$1
  shift
  echo "== $name"
  # shellcheck disable=SC2086
  "$kvpush" bench serve --json "$out/$name.json" "$@" ${ARGS:-} || failed=1
}

for case in "${cases[@]}"; do
  case $case in
    short)
      bench short "${all[@]}" --connector kvpush:sequential \
        --prompt-tokens 128 --prompt-tokens 500 --prompt-tokens 1000 --requests "$((2 * requests))"
      ;;
    load) bench load "${all[@]}" --prompt-tokens 2000 --qps 1 --qps 4 --requests "$((2 * requests))" ;;
    shaped) bench shaped "${all[@]}" --link "$rate" --prompt-tokens 4096 --prompt-tokens 8192 --requests "$requests" ;;
    shaped-load) bench shaped-load "${all[@]}" --link "$rate" --prompt-tokens 4096 --qps 70% --requests "$((2 * requests))" ;;
    *)
      echo "no case is called $case" >&2
      exit 2
      ;;
  esac
done
exit "$failed"
