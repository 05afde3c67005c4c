"""A run of DeepSpeed continues in PyTorch's FSDP2 and here, from its shards.

Two ranks of real DeepSpeed train the MLP of docs/examples/continue.c in ZeRO 1, 2 and 3, save, and take
five more steps. fsdp-convert writes the shards as DCP, which docs/examples/from_deepspeed.py loads into
FSDP2, and as a native checkpoint, which the example in C loads, on two ranks each. Their five steps have
the losses of DeepSpeed's.

usage: deepspeed_continue.py EXAMPLE_CONTINUE FSDP_CONVERT
"""

import os
import sys
import tempfile

import deepspeed_mlp as mlp
import deepspeed_ranks as ranks

PROGRAM, CONVERT = sys.argv[1:]
STAGES, RANKS, BEFORE, AFTER = (1, 2, 3), 2, 3, 5


def train_in_deepspeed():
    for stage in STAGES:
        engine = mlp.make_engine(stage)
        mlp.train(engine, BEFORE)
        engine.save_checkpoint(f"zero{stage}")
        ranks.tell(f"zero{stage}", mlp.train(engine, AFTER))


def train_in_torch():
    for stage in STAGES:
        model, optimizer = mlp.continued.make()
        mlp.from_deepspeed.load(model, optimizer, f"zero{stage}-dcp")
        ranks.tell(f"zero{stage}-dcp", mlp.continued.train(model, optimizer, AFTER))


def train_here(stage):
    told = ranks.run(PROGRAM, "--np", RANKS, f"zero{stage}-on", AFTER, f"zero{stage}-native")
    return [float(line.split()[1]) for line in told.splitlines()]


def convert(stage):
    ranks.run(CONVERT, f"zero{stage}", f"zero{stage}-dcp", "--to", "dcp", "--no-sync")
    # The program in C has its model below "model.".
    ranks.run(CONVERT, f"zero{stage}", f"zero{stage}-native", "--world-size", RANKS, "--no-sync",
              "--rename", "s/^layers/model.layers/")


def main():
    ranks.on_ranks(RANKS, train_in_deepspeed)
    for stage in STAGES:
        convert(stage)
    ranks.on_ranks(RANKS, train_in_torch)
    for stage in STAGES:
        wanted = ranks.told(f"zero{stage}")
        ranks.compare_losses(f"FSDP2 after ZeRO {stage}", ranks.told(f"zero{stage}-dcp"), wanted)
        ranks.compare_losses(f"C after ZeRO {stage}", train_here(stage), wanted)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    main()
