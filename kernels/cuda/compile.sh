#!/bin/sh
# Compiles kernels by nvcc and keeps, of what lies between, the PTX and the machine code. ptxas speaks of
# every kernel, which is not shown but kept in OBJECT.ptxas. usage: compile.sh OBJECT FOLDER NVCC ARGUMENT...
object=$1 folder=$2
shift 2
if ! "$@" -c -o "$object" -MD -MF "$object.d" --keep --keep-dir "$folder" >"$object.ptxas" 2>&1; then
    cat "$object.ptxas" >&2
    exit 1
fi
find "$folder" -type f ! -name '*.ptx' ! -name '*.cubin' -delete
