#!/usr/bin/env bash
# Trains 4 steps at once, and 2 and 2 with a checkpoint between them: the losses are the same text.
# usage: continue.sh PROGRAM
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"$1" --np 2 whole 4 >whole.txt
"$1" --np 2 half 2 >halves.txt
"$1" --np 2 rest 2 half >>halves.txt
diff whole.txt halves.txt
[ "$(wc -l <whole.txt)" = 4 ]
