#!/usr/bin/env bash
# Trains, checks that the loss falls, that ranks as threads and as processes have the same numbers, and that
# rank 0 wrote the whole model, the tied head once.
# usage: gpt.sh PROGRAM
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for way in "" "--threads 2 --check" "--np 2"; do
    rm -rf gpt-whole gpt.safetensors
    # shellcheck disable=SC2086 # none, or several words
    "$1" $way >"losses$way" 2>messages
    awk 'NR == 1 { first = $4 } END { exit !(NR == 40 && $4 < 0.7 * first) }' "losses$way"
    # 27 x 16 and 4 of 32 x 16 numbers of 4 bytes, and less than one more embedding of names
    size=$(stat -c %s gpt.safetensors)
    [ "$size" -gt 9920 ] && [ "$size" -lt $((9920 + 1728)) ]
    grep -aq '"layers.1.down.weight"' gpt.safetensors
    if grep -q "check:" messages; then
        cat messages
        exit 1
    fi
done
cmp "losses--threads 2 --check" "losses--np 2"
