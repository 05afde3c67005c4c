#!/usr/bin/env bash
# Installs the build and compiles and runs both consumer projects against it: shared and static, by
# CMake package and by pkg-config. So are docs/examples/train.c, which runs in every way, and gossip.c, which
# needs the API of FSDP1 besides.
# usage: install.sh cmake|pkgconfig BUILD [MPIEXEC]
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
for text in LICENSE README.md; do
    cmp "$here/../../$text" "$prefix/share/doc/fsdp/$text"
done
libdir=$(dirname "$(find "$work/prefix" -name libfsdp.a)")
mkdir "$work/consumer"
cd "$work/consumer"

case $1 in
cmake)
    configure() {
        cmake -S "$here/cmake" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" "$@" >>"$work/log" 2>&1
    }
    configure -B .
    cmake --build . >>"$work/log"
    # The shared library asks for no other package; the static one says what it needs.
    bare=-DCMAKE_DISABLE_FIND_PACKAGE_PkgConfig=ON
    configure -B shared -DLIBRARIES=fsdp $bare
    cmake --build shared --target with_fsdp >>"$work/log"
    if configure -B static $bare || ! grep -q "component 'static' of fsdp is not here" "$work/log"; then
        echo "a static library without pkg-config is not refused by name"
        exit 1
    fi
    ;;
pkgconfig)
    export PKG_CONFIG_PATH=$libdir/pkgconfig
    make -f "$here/pkgconfig/Makefile" SOURCE="$here/mesh_size.c" \
        EXAMPLE="$here/../../docs/examples/train.c" GOSSIP="$here/../../docs/examples/gossip.c" >>"$work/log"
    ;;
esac

export LD_LIBRARY_PATH=$libdir
for program in with_fsdp with_fsdp_static; do
    printed=$("./$program")
    echo "$program: $printed"
    [ "$printed" = "a mesh of 6 ranks" ]
done
# The static programs hold the library itself.
if ldd ./with_fsdp_static ./gossip_fsdp_static | grep libfsdp; then
    exit 1
fi
./gossip_fsdp --threads 3
./gossip_fsdp_static --threads 3

# However it is launched, 20 steps, and a loss that falls; four ranks have the same numbers.
train() {
    rm -rf example-ckpt
    "$@" >losses
    [ "$(wc -l <losses)" = 20 ]
    awk 'NR == 1 { first = $4 } END { exit !($4 < first) }' losses
    echo "$*: $(tail -n 1 losses)"
}
for program in ./train_fsdp ./train_fsdp_static; do
    train "$program"
    train "$program" --threads 4
    mv losses wanted
    train "$program" --np 4
    cmp losses wanted
    if [ -n "${3-}" ]; then
        train "$3" -n 4 --oversubscribe --allow-run-as-root "$program"
        cmp losses wanted
    fi
done
