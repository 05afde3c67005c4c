#!/usr/bin/env bash
# Builds the tools and the library for every Linux with glibc 2.28 or later: HDF5, zstd, zlib, xxHash and
# libseccomp are inside, and only glibc is outside. The wheel and the tarball are made from the result.
# usage: portable.sh [OUTPUT]
#
# OUTPUT (default: build-wheel) has tree/, an installed tree of tools with libfsdp.so, and static/, the same
# with tools that are one file each. Compiler and dependencies are kept in build-wheel (dependencies.sh).
set -euo pipefail
export LC_ALL=C
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
work=$root/build-wheel
output=$(realpath -m "${1:-$work}")
JOBS=$(nproc)

say() { printf '==> portable: %s\n' "$*"; }
die() { printf 'portable: %s\n' "$*" >&2; exit 1; }

# quietly LOG COMMAND...: the end of the log is shown when the command fails.
quietly() {
    local log=$1
    shift
    "$@" >"$log" 2>&1 || { tail -n 30 "$log" >&2; die "'$*' failed: $log"; }
}

# --- the project ----------------------------------------------------------------------------------

# make_tree NAME STATIC: where and when it is made does not change its bytes.
make_tree() {
    local build=$output/build tree=$output/$1
    say "compiling fsdp, for $tree"
    PKG_CONFIG_LIBDIR=$prefix/lib/pkgconfig quietly "$output/configure.log" cmake -S "$root" -B "$build" \
        -G Ninja -DCMAKE_C_COMPILER="$CC" -DCMAKE_AR="$AR" -DCMAKE_RANLIB=/bin/true \
        -DCMAKE_C_LINKER_LAUNCHER="/usr/bin/python3;$here/link_order.py" \
        -DCMAKE_BUILD_TYPE=Release -DCMAKE_C_FLAGS_RELEASE="-O2 -DNDEBUG" \
        -DCMAKE_C_FLAGS="-ffile-prefix-map=$build=. -ffile-prefix-map=$root=." \
        -DCMAKE_EXE_LINKER_FLAGS=-s -DCMAKE_SHARED_LINKER_FLAGS=-s -DCMAKE_MODULE_LINKER_FLAGS=-s \
        -DCMAKE_INSTALL_LIBDIR=lib -DFSDP_BUILD_TESTS=OFF -DFSDP_WITH_MPI=OFF -DFSDP_WITH_CUDA=OFF \
        -DFSDP_WARNINGS_AS_ERRORS=OFF -DFSDP_BUNDLED=ON -DFSDP_STATIC_TOOLS="$2"
    quietly "$output/build.log" cmake --build "$build" --parallel "$JOBS"
    rm -rf "$tree"
    quietly "$output/install.log" cmake --install "$build" --prefix "$tree"
    cp -r "$prefix/licenses" "$tree/licenses"
}


mkdir -p "$work" "$output"
# shellcheck source=base/package/dependencies.sh
. "$here/dependencies.sh"
export ZIG_GLOBAL_CACHE_DIR=$work/zig ZIG_LOCAL_CACHE_DIR=$work/zig
export CC=$work/tools/bin/cc AR=$work/tools/bin/ar RANLIB=/bin/true CFLAGS="$FLAGS"
make_deps
make_tree static ON
make_tree tree OFF
