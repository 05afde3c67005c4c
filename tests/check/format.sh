#!/usr/bin/env bash
# .c and .cu files are laid out by clang-format (./dev format does it); headers by hand, so that their
# comments stay in columns (at most 110). Nothing has tabs or blanks at line ends.
# usage: format.sh REPOSITORY
set -u
export LC_ALL=C.UTF-8 # grep counts characters, not bytes
cd "$1" || exit 1
folders=(base kernels formats statedict runtime tools tests)
failed=0

mapfile -t sources < <(find "${folders[@]}" -name '*.c' -o -name '*.cu' | sort)
# Another clang-format lays out otherwise.
tested=14 version=$(clang-format --version | grep -oE '[0-9]+' | head -n 1)
[ "$version" = $tested ] || sources=()
ugly=$([ ${#sources[@]} = 0 ] ||
    clang-format --dry-run -Werror "${sources[@]}" 2>&1 | grep -oE '^[^: ]+\.cu?:' | sort -u)
if [ -n "$ugly" ]; then
    printf 'not laid out; ./dev format does it:\n%s\n' "$ugly"
    failed=1
fi

mapfile -t texts < <(find "${folders[@]}" CMakeLists.txt dev -type f \
    \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cmake' -o -name '*.py' \
    -o -name '*.sh' -o -name CMakeLists.txt -o -name dev \) | sort)
if grep -nP '\t|[ \t]+$' "${texts[@]}"; then
    echo "tabs or blanks at line ends"
    failed=1
fi
if grep -nE '^.{111,}' "${texts[@]}"; then
    echo "lines of more than 110 columns"
    failed=1
fi
echo "${#sources[@]} sources, ${#texts[@]} texts"
if [ $failed = 0 ] && [ "$version" != $tested ]; then
    echo "skipped: clang-format $version is not $tested, which the sources are laid out by"
    exit 77
fi
exit $failed
