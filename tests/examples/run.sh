#!/usr/bin/env bash
# Runs a command in an empty directory.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"$@"
