#!/usr/bin/env bash
# Installs the build and compiles and runs both consumer projects against it: shared and static, by
# CMake package and by pkg-config. usage: install.sh cmake|pkgconfig BUILD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$2" --prefix "$work/prefix" >"$work/log"
prefix=$work/prefix
[ "$("$prefix/bin/fsdp-inspect" --version | head -n 1)" = "$("$prefix/bin/fsdp-ls" --version | head -n 1 |
    sed s/fsdp-ls/fsdp-inspect/)" ]
for tool in ls inspect verify diff gc convert bench; do
    grep -q "^complete -F" "$prefix/share/bash-completion/completions/fsdp-$tool"
    grep -q "^#compdef fsdp-$tool" "$prefix/share/zsh/site-functions/_fsdp-$tool"
    grep -q "^complete -c fsdp-$tool" "$prefix/share/fish/vendor_completions.d/fsdp-$tool.fish"
done
libdir=$(dirname "$(find "$work/prefix" -name libfsdp.a)")
mkdir "$work/consumer"
cd "$work/consumer"

case $1 in
cmake)
    cmake -S "$here/cmake" -B . -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" >>"$work/log"
    cmake --build . >>"$work/log"
    ;;
pkgconfig)
    export PKG_CONFIG_PATH=$libdir/pkgconfig
    make -f "$here/pkgconfig/Makefile" SOURCE="$here/mesh_size.c" >>"$work/log"
    ;;
esac

export LD_LIBRARY_PATH=$libdir
for program in with_fsdp with_fsdp_static; do
    printed=$("./$program")
    echo "$program: $printed"
    [ "$printed" = "a mesh of 6 ranks" ]
done
# The static program holds the library itself.
! ldd ./with_fsdp_static | grep libfsdp
