"""Universal checkpoints in both directions: ds_to_universal's are read, and DeepSpeed continues from ours.

Real DeepSpeed trains on two ranks in ZeRO 1, 2 and 3. ds_to_universal's result has the state of its source,
and ours has its tensors. Engines of another stage and number of ranks, with other weights and
hyper-parameters, load what fsdp-convert --to universal makes of the shards, of a DCP of FSDP2 and of a native
checkpoint of docs/examples/continue.c, and have the losses of the run that continued.

usage: deepspeed_universal.py EXAMPLE_CONTINUE FSDP_CONVERT FSDP_DIFF
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import deepspeed_mlp as mlp
import deepspeed_model
import deepspeed_ranks as ranks
import torch
from deepspeed.checkpoint import ds_to_universal
from states import same

PROGRAM, CONVERT, DIFF = sys.argv[1:]
RANKS, BEFORE, AFTER, OTHER_SEED = 2, 3, 5, 2
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0.0, "warmup_max_lr": 0.02}}
SHARDED = {  # runs that are converted from shards: their stage and what else their engines have
    "zero1": (1, {}),
    "zero2-bf16": (2, {"bf16": {"enabled": True}, "scheduler": WARMUP, "gradient_clipping": 0.1}),
    # Stage 3 gives all groups what the first one has, and steps once per group. It is the last, because
    # its engine gives the process another linear function, which rounds otherwise in bf16.
    "zero3": (3, {"one_group": True}),
}
LOADS = {  # from a run: the stages and numbers of ranks on which DeepSpeed continues
    "zero1": [(1, 3), (2, 1)],
    "zero2-bf16": [(1, 2)],  # on as many ranks: their mean rounds to bf16
    "zero3": [(3, 3), (3, 1), (1, 1)],
    "fsdp2": [(1, 1), (2, 4)],
    "native": [(2, 1), (1, 4)],
}


# --- runs that are converted ---


def train_in_deepspeed():
    for source, (stage, settings) in SHARDED.items():
        engine = deepspeed_model.make_engine(stage, **settings)
        deepspeed_model.train(engine, 0, BEFORE)
        engine.save_checkpoint(source)
        ranks.tell(source, deepspeed_model.train(engine, BEFORE, AFTER))
    torch.manual_seed(1)
    model, optimizer = mlp.continued.make()
    mlp.continued.train(model, optimizer, BEFORE)
    mlp.continued.save(model, optimizer, "fsdp2")
    ranks.tell("fsdp2", mlp.continued.train(model, optimizer, AFTER))


def train_here(*arguments):
    told = ranks.run(PROGRAM, "--np", RANKS, *arguments)
    return [float(line.split()[1]) for line in told.splitlines()]


# --- DeepSpeed continues ---


def engine_for(source, stage):
    settings = {"seed": OTHER_SEED, "forget": True, "checkpoint": {"load_universal": True}}
    if source in SHARDED:
        return deepspeed_model.make_engine(stage, **settings, **SHARDED[source][1])
    # Native checkpoints have hyper-parameters by parameter: a group comes when its first parameter does.
    return mlp.make_engine(stage, last_first=source == "fsdp2", **settings)


def load_and_train(count):
    wanted = [(source, stage) for source, loads in LOADS.items() for stage, n in loads if n == count]
    for source, stage in wanted:
        engine = engine_for(source, stage)
        engine.load_checkpoint(f"{source}-universal")
        is_sharded = source in SHARDED
        losses = deepspeed_model.train(engine, BEFORE, AFTER) if is_sharded else mlp.train(engine, AFTER)
        ranks.tell(f"{source}-{stage}-{count}", losses)


# --- next to ds_to_universal ---


def convert_with_deepspeed(source, target):
    wanted = SimpleNamespace(input_folder=source, output_folder=target, num_extract_workers=1,
                             num_merge_workers=1, keep_temp_folder=False, strict=True,
                             inject_missing_state=True)
    with contextlib.redirect_stdout(None):
        ds_to_universal.main(wanted)


def compare_files(theirs, ours):
    """Every tensor of theirs is in the file of the same name in ours; theirs of stage 3 are flat."""
    files = [path.relative_to(theirs) for path in theirs.glob("zero/*/*.pt")]
    assert len(files) > 20, files
    for path in files:
        if not (ours / path).exists():  # tied names and buffers, which their loader does not look at
            assert path.name == "fp32.pt" and not (theirs / path).with_name("exp_avg.pt").exists(), path
            continue
        wanted, found = (torch.load(folder / path, weights_only=True) for folder in (theirs, ours))
        wanted = wanted["param"] if isinstance(wanted, dict) else wanted
        found = found["param"] if isinstance(found, dict) else found
        assert same(wanted.flatten(), found.flatten()), f"{path}: {found}, not {wanted}"


def compare_with_deepspeed(source):
    """Their result has the state of the source, moments and steps included, and ours has their tensors."""
    theirs = f"{source}/theirs"
    convert_with_deepspeed(f"{source}/global_step{BEFORE}", theirs)
    # From stage 1 it takes the frozen weight out of the model file, too, and from others as f32.
    print(ranks.run(DIFF, f"{source}/global_step{BEFORE}", theirs, "-X", "^fixed"))
    compare_files(Path(theirs), Path(f"{source}-universal/universal"))


def main():
    ranks.on_ranks(RANKS, train_in_deepspeed)
    train_here("native", BEFORE)
    losses = {source: train_here("native-on", AFTER, "native") if source == "native" else ranks.told(source)
              for source in LOADS}
    for source in LOADS:
        # Both have their model below "model.", which DeepSpeed's modules do not.
        ranks.run(CONVERT, source, f"{source}-universal", "--to", "universal", "--no-sync")
    for source in SHARDED:
        compare_with_deepspeed(source)
    for count in sorted({count for loads in LOADS.values() for _, count in loads}):
        ranks.on_ranks(count, load_and_train, count)
    for source, loads in LOADS.items():
        for stage, count in loads:
            what = f"stage {stage} on {count} ranks after {source}"
            ranks.compare_losses(what, ranks.told(f"{source}-{stage}-{count}"), losses[source])


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    main()
