#!/usr/bin/env bash
# Shell scripts, by shellcheck. usage: shell.sh REPOSITORY
cd "$1" || exit 1
mapfile -t scripts < <(find base tests -name '*.sh' | sort)
shellcheck -x dev .ci/run "${scripts[@]}" && echo "$((${#scripts[@]} + 2)) scripts"
