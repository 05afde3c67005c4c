#!/usr/bin/env bash
# Makes what the console blocks of docs/cookbook work on, in a new directory: a small run of ours, and
# checkpoints that the real frameworks wrote (tests/golden). usage: docs_setup.sh DIRECTORY
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
golden=$root/tests/golden
build=${FSDP_BUILD:-$root/build}
bench=$build/bin/fsdp-bench
if [ $# != 1 ]; then
    echo "usage: docs_setup.sh DIRECTORY" >&2
    exit 2
fi
if [ ! -x "$bench" ]; then
    echo "error: there are no tools in '$build/bin': ./dev build makes them" >&2
    exit 3
fi
mkdir "$1"
cd "$1"

"$bench" make --quiet --no-sync --model gpt2 --scale 0.0001 --world-size 4 --saves 3 --seed 1 run

take() { cp -r "$golden/$1/data" "$2" && chmod -R u+w "$2"; }
take dcp/fsdp2-adamw-w2 dcp
take dcp/fsdp2-mixed-tied-frozen-w4 dcp-tied
take rankfiles/fsdp2-uneven-w4 ranks
take rankfiles/verl-fsdp2-w2 verl
take deepspeed/zero3-w4-fp32 ds
take hf/qwen2_sharded_bf16 hf
cp "$golden/torchsave/training_full/data/training_full.pt" train.pt
cp "$golden/torchsave/module_state_dict/data/module_state_dict.pt" model.pt
cp "$golden/hostile/pickle_calls/data/os_system.pt" evil.pt
ln -s "$build/tests/example_continue" continue
mkdir node0 node1
cp ranks/rank_0.pt ranks/rank_1.pt node0
cp ranks/rank_2.pt ranks/rank_3.pt node1
