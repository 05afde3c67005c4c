#!/usr/bin/env bash
# Every build of the product saves, verifies, converts and trains, whatever it was built with.
# usage: use.sh DIRECTORY, which is empty; the tools are on PATH
set -euo pipefail
cd "$1"
fsdp-bench make --quiet --model gpt2 --scale 0.01 --world-size 3 --seed 1 ckpt
fsdp-verify ckpt
fsdp-convert --quiet ckpt on-2 --world-size 2 --compress zstd
fsdp-diff ckpt on-2
fsdp-convert --quiet on-2 model.safetensors -I '^model'
seq 3000 >numbers.txt
fsdp-train --run trained --data.path numbers.txt --model.layers 1 --model.width 16 --train.steps 2 --np 2
fsdp-verify --latest trained
