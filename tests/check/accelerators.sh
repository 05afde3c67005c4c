#!/usr/bin/env bash
# FSDP_WITH_CUDA and FSDP_WITH_NCCL: a missing toolkit or header is named; where they are, both are on by
# themselves and stand in --version. Only configures. usage: accelerators.sh REPOSITORY
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# configure REPOSITORY OPTION...: the output of cmake, in one line without double blanks. It begins with the
# compilers that a kept build folder found, because finding gcc takes 0.8 s and trying nvcc 2 s.
configure() {
    rm -rf "$work/build"
    [ ! -d "$work/kept" ] || cp -r "$work/kept" "$work/build"
    cmake -S "$1" -B "$work/build" -G Ninja -DFSDP_BUILD_TESTS=OFF -DFSDP_WITH_MPI=OFF "${@:2}" 2>&1 |
        tr -s ' \n' ' '
}

keep_build() {
    rm -rf "$work/kept"
    cp -r "$work/build" "$work/kept"
}

# The line that --version would print, without the marks that quote it for the shell.
features() { grep -m 1 -o 'FSDP_FEATURES_TEXT=.*' "$work/build/build.ninja" | sed 's/[\]//g'; }

expect() {
    case $2 in
    *"$1"*) echo "says: $1" ;;
    *)
        printf 'expected: %s\nfound: %s\n' "$1" "$2"
        failed=1
        ;;
    esac
}

without=-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
said=$(configure "$1" $without)
expect "FSDP_WITH_CUDA: off, because no CUDA toolkit of version 12.1 or later was found" "$said"
expect "Build files have been written" "$said"
expect ', no CUDA' "$(features)"
keep_build

said=$(configure "$1" -DFSDP_WITH_CUDA=ON $without)
expect "no CUDA toolkit of version 12.1 or later was found. Install cuda-nvcc and cuda-cudart-dev" "$said"

if [ -z "$(command -v nvcc)" ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "no CUDA toolkit here: finding it was not tried"
    exit $failed
fi
said=$(configure "$1" -UCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit)
expect "Build files have been written" "$said"
expect ', CUDA 1' "$(features)"
keep_build

said=$(configure "$1" -DFSDP_SANITIZE=address)
expect "FSDP_WITH_CUDA: off with sanitizers" "$said"
expect ', no CUDA' "$(features)"

said=$(configure "$1" -DFSDP_WITH_CUDA=OFF)
expect "Build files have been written" "$said"
expect ', no CUDA' "$(features)"
exit $failed
