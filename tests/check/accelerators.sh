#!/usr/bin/env bash
# FSDP_WITH_CUDA and FSDP_WITH_NCCL: what is missing is named, and where the toolkit is, both are found,
# link, and stand in --version. Only configures. usage: accelerators.sh REPOSITORY
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# configure REPOSITORY OPTION...: the output of cmake, in one line without double blanks. It begins with the
# compilers that a kept build folder found, because finding gcc takes 0.8 s and nvcc 4 s.
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

said=$(configure "$1")
expect "Build files have been written" "$said"
expect ', no CUDA, no NCCL' "$(features)"
keep_build

for option in CUDA NCCL; do
    said=$(configure "$1" -DFSDP_WITH_$option=ON -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON)
    expect "no CUDA toolkit of version 12 or later was found. Install cuda-nvcc and cuda-cudart-dev" "$said"
done

if [ -z "$(command -v nvcc)" ] && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    echo "no CUDA toolkit here: finding it was not tried"
    exit $failed
fi
said=$(configure "$1" -DFSDP_WITH_CUDA=ON)
expect "Build files have been written" "$said"
written=$(features)
expect ', CUDA 1' "$written"
expect '(not used yet), no NCCL' "$written"
keep_build

said=$(configure "$1" -DFSDP_WITH_CUDA=OFF -DFSDP_WITH_NCCL=ON)
case $said in
*"nccl.h or libnccl was not found. Install libnccl-dev"*) echo "no NCCL here" ;;
*)
    expect "Build files have been written" "$said"
    expect ', NCCL 2.' "$(features)"
    said=$(configure "$1" -DFSDP_WITH_CUDA=OFF -DFSDP_WITH_NCCL=ON -DFSDP_NCCL_LIBRARY=/nowhere/libnccl.so)
    expect "a program that calls ncclGetVersion does not compile and link with /nowhere/libnccl.so" "$said"
    ;;
esac
exit $failed
