#!/usr/bin/env bash
# Spelling of sources and documents. usage: spell.sh REPOSITORY
cd "$1" || exit 1
codespell --ignore-words tests/check/spell_ignore.txt \
    --skip '*.h5,*.json,*.bin,corpus,golden,docs/demo/*.svg,__pycache__,LICENSE' \
    base kernels formats statedict runtime tools tests docs README.md CMakeLists.txt dev
