#!/usr/bin/env bash
# Every public header compiles alone, as C17 and as C++17. usage: headers.sh BUILD
set -u
failed=0 count=0
for header in "$1"/include/fsdp/*.h; do
    name=fsdp/$(basename "$header")
    count=$((count + 1))
    echo "#include <$name>" | gcc -std=c17 -Wall -Wextra -Wpedantic -Werror -I"$1/include" \
        -fsyntax-only -x c - || { echo "$name is not C17 by itself"; failed=1; }
    echo "#include <$name>" | g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -I"$1/include" \
        -fsyntax-only -x c++ - || { echo "$name is not C++17 by itself"; failed=1; }
done
echo "$count headers"
[ "$count" -gt 0 ] && exit $failed
