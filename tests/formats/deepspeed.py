"""DeepSpeed's checkpoints: conversions from which a run continues, forms that no fixture has, and refusals.

usage: deepspeed.py BIN GOLDEN
"""

import hashlib
import json
import os
import re
import resource
import shutil
import struct
import sys
import tempfile
from pathlib import Path

import deepspeed_files as made
from tools import check, follow_next, listing, problems, run

GOLDEN = Path(sys.argv[2]) / "deepspeed"
FEWER = "FSDP_TEST_FEWER" in os.environ
DAMAGED, REFUSED, LIMIT, NOT_KNOWN = 4, 5, 9, 3
TARGETS = {"dcp": ["--to", "dcp", "--world-size", "3"], "fsdp": ["--world-size", "2"]}


def same(tensors, expected):
    """The names whose tensors differ."""
    kept = ("dtype", "shape", "sha256")
    return [name for name, tensor in expected.items()
            if {key: tensors.get(name, {}).get(key) for key in kept} != {key: tensor[key] for key in kept}]


def digest(kind, *numbers):
    return hashlib.sha256(struct.pack(f"<{len(numbers)}{kind}", *numbers)).hexdigest()


# --- conversions ------------------------------------------------------------------------------------


def names_of_groups(values):
    """The parameters of all optim.param_groups.N.params."""
    return [name for key, value in values.items() if re.fullmatch(r"optim\.param_groups\.\d+\.params", key)
            for name in value]


def check_state(where, told, expected):
    """The state that PyTorch asks for: a step per parameter, names in groups."""
    moments = [name for name in expected["tensors"] if name.endswith(".exp_avg")]
    step = float(expected["values"]["optimizer_state.step"][0])
    for name in moments:
        found = told["tensors"].get(name.removesuffix("exp_avg") + "step", {})
        check(found.get("sha256") == digest("f", step), f"{where}: {name} has another step")
    if "optimizer_state.param_groups" not in expected["values"]:
        return
    named = names_of_groups(told["values"])
    trained = [name.removeprefix("optim.state.").removesuffix(".exp_avg") for name in moments]
    # a pipeline's groups are those of all stages, and experts are in the group of their rank
    check(sorted(named) == sorted(trained), f"{where}: the groups name {named}")
    rate = told["values"]["optim.param_groups.0.lr"]
    check(rate == expected["values"]["optimizer_state.param_groups"][0]["lr"], f"{where}: lr is {rate}")


def check_target(case, expected, target, folder):
    copy = folder / f"copy.{target}"
    where = f"{case.name} -> {target}"
    ran = run("fsdp-convert", case / "data", copy, *TARGETS[target])
    check(ran.returncode == 0, f"{where}: {ran.stderr}")
    told = listing(copy)
    check(not (differ := same(told["tensors"], expected["tensors"])), f"{where}: {differ} differ")
    check_state(where, told, expected)
    ran = run("fsdp-diff", case / "data", copy)
    check(ran.returncode == 0, f"{where}: {ran.stdout}{ran.stderr}")


def check_model(case, expected, folder):
    """For Hugging Face: the model alone, as zero_to_fp32 has it."""
    ran = run("fsdp-convert", case / "data", folder / "hf")
    check(ran.returncode == 0, f"{case.name} -> hf: {ran.stderr}")
    told = listing(folder / "hf")
    model = {name: tensor for name, tensor in expected["tensors"].items() if not name.startswith("optim.")}
    tensors = told["tensors"] | {name: told["tensors"][of] for name, of in told["aliases"].items()}
    check(set(tensors) == set(model), f"{case.name} -> hf: {set(tensors) ^ set(model)}")
    check(not (differ := same(tensors, model)), f"{case.name} -> hf: {differ} differ")


def check_back(case, expected, folder):
    """DCP, a native checkpoint of it, and from that a torch.save file."""
    steps = [("dcp", "again.fsdp", []), ("again.fsdp", "again.pt", [])]
    run("fsdp-convert", case / "data", folder / "dcp", "--to", "dcp")
    for source, copy, options in steps:
        ran = run("fsdp-convert", folder / source, folder / copy, *options)
        check(ran.returncode == 0, f"{case.name}: {source} -> {copy}: {ran.stderr}")
        differ = same(listing(folder / copy)["tensors"], expected["tensors"])
        check(not differ, f"{case.name}: {source} -> {copy}: {differ} differ")


def check_universal(case, expected, folder):
    """A universal checkpoint has the same tensors, steps and groups, and the files of every stage."""
    where = f"{case.name} -> universal"
    # a short path, since a long line is not printed as the next one
    ran = run("fsdp-convert", "data", folder / "universal", "--to", "universal", cwd=case)
    check(ran.returncode == 0, f"{where}: {ran.stderr}")
    compared = follow_next(ran.stdout, cwd=case)
    check(compared and compared.returncode == 0, f"{where}: what is next finds {compared}")
    ran = run("fsdp-convert", folder / "universal", folder / "again", "--to", "dcp")
    check(ran.returncode == 0, f"{where} -> dcp: {ran.stderr}")
    told = listing(folder / "again")
    # frozen weights become f32, as all that is called fp32.pt
    f32 = {name: tensor for name, tensor in expected["tensors"].items()
           if tensor["dtype"] not in ("f16", "bf16")}
    check(not (differ := same(told["tensors"], f32)), f"{where}: {differ} differ")
    check(set(expected["tensors"]) <= set(told["tensors"]), f"{where}: tensors are lost")
    check_state(where, told, expected)
    tag = folder / "universal" / (folder / "universal" / "latest_universal").read_text()
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt",
                 "zero/optimizer_state.pt"):
        check((tag / name).exists(), f"{where}: {name} is missing")
    state = listing(tag / "zero/optimizer_state.pt")["values"]
    check("ds_version" in state, f"{where}: stages 1 and 2 refuse an optimizer's file of no version")
    clip, found = expected["values"].get("optimizer_state.clip_grad"), state.get("clip_grad")
    check(found == clip, f"{where}: gradients are clipped to {found}, not {clip}")


def check_golden():
    cases = sorted(path.parent for path in GOLDEN.glob("*/expected.json"))
    check(len(cases) > 20, "there are no cases")
    for case in cases[:: 5 if FEWER else 1]:
        expected = json.loads((case / "expected.json").read_text())
        with tempfile.TemporaryDirectory() as folder:
            for target in TARGETS:
                check_target(case, expected, target, Path(folder))
            check_model(case, expected, Path(folder))
            check_back(case, expected, Path(folder))
            check_universal(case, expected, Path(folder))


def check_universal_refused(folder):
    """A source that DeepSpeed could not continue from is refused."""
    source = GOLDEN / "zero2-w2-nofrozen" / "data"
    cases = {("--only", "model"): "has no optimizer state",
             ("--rename", "s/^gain$/a\\/b/"): "'a/b': DeepSpeed needs a folder with its name",
             ("--rename", "s/^gain$/g/"): "DeepSpeed finds the states of a weight NAME as optim.state",
             ("--rename", "s/state.gain.exp_avg$/state.gain.fp32/"): "a file with the name of its key",
             ("--rename", "s/^global_steps$/module/"): "'module': DeepSpeed has a member of that name"}
    for number, (options, why) in enumerate(cases.items()):
        to = folder / str(number)
        ran = run("fsdp-convert", source, to, "--to", "universal", *options)
        check(ran.returncode == 2 and why in ran.stderr, f"{options}: {ran.returncode} {ran.stderr}")
        check(not to.exists(), f"{options}: a result is there")
    ran = run("fsdp-convert", source, folder / "kept", "--to", "universal")
    (folder / "kept" / "notes.txt").write_text("mine")
    ran = run("fsdp-convert", source, folder / "kept", "--to", "universal", "--overwrite")
    check(ran.returncode == 6 and "'notes.txt'" in ran.stderr, f"overwrite: {ran.returncode} {ran.stderr}")


def check_universal_of_pytorch(folder):
    """FSDP2's checkpoints: a bf16 weight becomes f32, and the keys above the model go although it does."""
    source = GOLDEN.parent / "dcp" / "fsdp2-mixed-tied-frozen-w4" / "data"
    ran = run("fsdp-convert", source, folder / "universal", "--to", "universal")
    check(ran.returncode == 0, f"FSDP2 -> universal: {ran.stderr}")
    tensors, stored = listing(folder / "universal")["tensors"], listing(source)["tensors"]
    for name, dtype in (("emb.weight", "f32"), ("blocks.0.up.weight", "f32"), ("seen", "i64")):
        check(tensors.get(name, {}).get("dtype") == dtype, f"FSDP2 -> universal: {name}")
    for name in ("optim.state.blocks.0.up.weight.exp_avg", "optim.state.emb.weight.exp_avg_sq"):
        check(tensors.get(name) == stored[name], f"FSDP2 -> universal: {name} differs")


# --- paths ------------------------------------------------------------------------------------------


def steps_of(path):
    told = listing(path)
    return told and told["values"]["global_steps"]


def check_paths(folder):
    shutil.copytree(GOLDEN / "two-tags" / "data", folder / "run")
    check(steps_of(folder / "run") == 2, "latest is not followed")
    check(steps_of(folder / "run" / "global_step3") == 3, "a tag is not read")
    trainer = folder / "trainer" / "checkpoint-3"
    shutil.copytree(folder / "run" / "global_step3", trainer / "global_step3")
    (trainer / "latest").write_text("global_step3\n")
    (trainer / "trainer_state.json").write_text("{}")
    check(steps_of(folder / "trainer") == 3, "a Trainer's run is not read")
    (trainer / "config.json").write_text('{"model_type": "of tests"}')
    run("fsdp-convert", folder / "trainer", folder / "hf")
    check((folder / "hf" / "config.json").exists(), "a Trainer's configuration is not copied")
    (trainer / "latest").unlink()
    check(steps_of(trainer) == 3, "the only tag is not found")
    check_pointers(folder, folder / "run")


def check_pointers(folder, path):
    """A pointer to what is not there is no other checkpoint: a tag or --from chooses."""
    for name in ("../trainer/checkpoint-3/global_step3", "global_step9", "", "global_step3\nstep_a"):
        (path / "latest").write_text(name)
        shown = name.replace("\n", "")[:10]
        for command in (("fsdp-ls", path), ("fsdp-verify", path), ("fsdp-verify", "--latest", path),
                        ("fsdp-convert", path, folder / "no", "--to", "fsdp")):
            ran = run(*command)
            words = (f"/latest' names '{shown}", "which is missing", "has 'global_step3', 'step_a'")
            check(ran.returncode == DAMAGED and all(word in ran.stderr for word in words),
                  f"{command[0]} with a pointer to {name!r}: {ran.returncode} {ran.stderr}")
    ran = run("fsdp-convert", path, folder / "chosen", "--to", "fsdp", "--from", "deepspeed")
    check(ran.returncode == 0 and steps_of(folder / "chosen") == 3, f"a format is chosen: {ran.stderr}")
    (path / "latest").write_text("step_a")
    ran = run("fsdp-convert", path, folder / "pointed", "--to", "fsdp", "--from", "deepspeed")
    check(ran.returncode == 0 and steps_of(folder / "pointed") == 2,
          f"a format is chosen, and the pointer leads to a tag: {ran.stderr}")
    check(steps_of(path / "step_a") == 2, "a tag is not read beside a pointer to nothing")


# --- forms ------------------------------------------------------------------------------------------


def check_form(folder, what, files, kinds):
    """The numbers that deepspeed_files.py writes come out under their names."""
    tensors = listing(made.write(folder / what, files))["tensors"]
    for name, shape in made.SHAPES.items():
        for kind, prefix in enumerate(kinds):
            spelled = f"optim.state.{name}.{prefix}" if prefix else name
            found = tensors.get(spelled, {})
            check(found.get("sha256") == digest("f", *made.numbers_of(name, kind)), f"{what}: {spelled}")
            check(found.get("shape") == list(shape), f"{what}: {spelled} has shape {found.get('shape')}")
    check(tensors["tied"]["sha256"] == tensors["w"]["sha256"], f"{what}: a tied name")
    return tensors


def check_forms(folder):
    for stage in (1, 2, 3):
        tensors = check_form(folder, f"zero{stage}", made.files(stage), ("", "exp_avg", "exp_avg_sq"))
        frozen = digest("e", *made.numbers_of("frozen"))
        check(tensors["frozen"]["sha256"] == frozen, f"stage {stage}: a frozen weight")
        check(tensors["half"]["sha256"] == digest("f", 0.5, 1.5), f"stage {stage}: a buffer of f16")
        check(tensors["double"]["sha256"] == digest("f", 0.25), f"stage {stage}: a buffer of f64")
        check(tensors["count"]["dtype"] == "i64", f"stage {stage}: a buffer of integers")
    for form in ("torch", "each", "flat"):
        check_form(folder, form, made.plain_files(form), ("", "exp_avg"))
    for stage in (1, 3):
        tensors = check_form(folder, f"universal{stage}", made.universal_files(stage), ("", "exp_avg"))
        check("other" in tensors, "a folder that the module alone has")


def check_ranks(folder):
    """Parameters, and the gaps after them, that lie on one rank, on several, and begin within one: 'w' has
    15 of 20 elements, so that it is on four of five ranks."""
    gaps = [[3, 9, 0, 2], [0, 0, 0, 13], [1, 1, 1, 1], made.NO_GAPS]
    for ranks in (1, 3, 5, 6, 20):
        check_form(folder, f"zero3 of {ranks}", made.files(3, ranks), ("", "exp_avg", "exp_avg_sq"))
        for number, some in enumerate(gaps[:: 3 if FEWER else 1]):
            check_form(folder, f"zero2 of {ranks}, gaps {number}", made.files(2, ranks, some),
                       ("", "exp_avg", "exp_avg_sq"))


def check_padding(folder):
    """Ranks are padded to a multiple of two elements each; more is not a padding."""
    for rows, columns, wanted in (3, 5, 0), (3, 4, 0), (1, 11, DAMAGED):
        files = made.files(2, 2)
        shapes = made.OrderedDict(made.SHAPES) | {"w": (rows, columns)}
        files[made.model_name(0, 2)] |= {"param_shapes": [shapes], "frozen_param_shapes": {}, "module": {},
                                         "frozen_param_fragments": {}, "buffer_names": []}
        ran = run("fsdp-ls", "--json", made.write(folder / str(columns), files))
        check(ran.returncode == wanted, f"padding of {15 - rows * columns}: {ran.returncode} {ran.stderr}")


def members_of_universal(folder, what, source, *options):
    """The values of the model's file, as a universal checkpoint of the source has them."""
    ran = run("fsdp-convert", source, folder / what, "--to", "universal", *options)
    check(ran.returncode == 0, f"{what}: {ran.stderr}")
    tag = folder / what / (folder / what / "latest_universal").read_text()
    return listing(tag / "mp_rank_00_model_states.pt")["values"]


def names_below(values, prefix):
    return [name.removeprefix(prefix) for name in values if name.startswith(prefix)]


def check_lists_of_universal(folder):
    """The lists by which DeepSpeed finds what it loads: every name once, in whatever order they come."""
    made.save(folder / "tied.pt", made.pytorch_file())
    told = members_of_universal(folder, "tied", folder / "tied.pt")
    names, tied = told["buffer_names"], names_below(told, "shared_params.")
    check((names, tied) == (["count", "other"], ["again", "same"]), f"buffers: {names}, {tied}")


def check_own_steps(folder):
    """Parameters of one group may have different steps in a universal checkpoint."""
    names = list(made.SHAPES)[:2]
    files = universal(2, f"zero/{names[1]}/step.pt", made.tensor([9.0], ()))
    source = made.write(folder / "own_steps", files)
    ran = run("fsdp-convert", source, folder / "own_steps_fsdp", "--to", "fsdp")
    check(ran.returncode == 0, f"other steps: {ran.stderr}")
    tensors = listing(folder / "own_steps_fsdp")["tensors"]
    first, second = (tensors.get(f"optim.state.{name}.step", {}).get("sha256") for name in names)
    check(first and second == digest("f", 9) != first, f"other steps: {first}, {second}")


def check_names_of_the_module(folder):
    """A module under two names is tied, as its parameters are; a weight of the module alone is told of."""
    files = made.files(2)
    module = files[made.model_name(0, 2)]["module"]
    module |= {"again": made.view_of(module["w"]), "other": made.view_of(module["w"], (5, 3)),
               "alone": made.tensor([1.0], None, "e")}
    path = made.write(folder / "names", files)
    tensors = listing(path)["tensors"]
    check(tensors["again"] == tensors["w"], f"a second name: {tensors.get('again')}")
    check("other" not in tensors and "alone" not in tensors, f"rounded weights: {list(tensors)}")
    ran = run("fsdp-convert", path, folder / "names-hf", "--to", "hf", "--no-sync")
    check(ran.returncode == 0 and "2 weights left out" in ran.stderr, f"rounded weights: {ran.stderr}")
    ran = run("fsdp-convert", made.write(folder / "all", made.files(2)), folder / "all-hf", "--to", "hf")
    check(ran.returncode == 0 and "left out:" not in ran.stderr, f"no rounded weights: {ran.stderr}")


def check_unsure(folder):
    """Two weights of one shape, of which one is frozen: moments keep their numbers."""
    files = made.plain_files("torch")
    told = files[made.model_name(0, 0)]
    told["module"]["like_b"] = made.tensor([0.0] * 4)
    names = listing(made.write(folder / "unsure", files))["tensors"]
    check("optim.state.1.exp_avg" in names and "optim.state.b.exp_avg" not in names, "a guess was made")


# --- refusals ---------------------------------------------------------------------------------------


def changed(stage, rank, change):
    """The files of a tag, with a change to the optimizer's dict of a rank."""
    files = made.files(stage)
    change(files[made.optim_name(rank)]["optimizer_state_dict"])
    return files


def with_model(stage, **members):
    files = made.files(stage)
    files[made.model_name(0, stage)] |= members
    return files


def without(stage, name):
    files = made.files(stage)
    del files[name]
    return files


def counting(stage, count):
    def change(optim):
        optim["partition_count"] = count

    return changed(stage, 0, change)


def other_shapes(**shapes):
    """The module has no weights, which would contradict the shapes."""
    return with_model(2, param_shapes=[made.OrderedDict(made.SHAPES) | shapes], module={})


def with_gaps(gaps):
    return changed(2, 0, lambda optim: optim.update(param_alignment_paddings=gaps))


def with_states(states):
    return changed(2, 0, lambda optim: optim["base_optimizer_state"]["state"].update(states))


def mastering(master, stage=2):
    """Rank 1 has other masters, and the module no weights, which would contradict them."""
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    files = made.files(stage)
    files[made.optim_name(1)]["optimizer_state_dict"][key] = master
    for name, thing in files.items():
        if "model" in name:
            thing["module"] = {}
    return files


def universal(stage, name, thing):
    files = made.universal_files(stage)
    files[name] = thing
    return {name: thing for name, thing in files.items() if thing is not None}


def experts(count, ranks):
    """One group of experts, of which every rank has its own."""
    word = "deepspeed_experts.0." + "x" * 2000
    shapes = made.OrderedDict((f"{word}.{i}", (0,)) for i in range(count))
    told = {"partition_count": [ranks, 1], "zero_stage": 2, "base_optimizer_state": [{}, {}],
            "single_partition_of_fp32_groups": [made.tensor([]), made.tensor([])]}
    model = {"module": {}, "buffer_names": [], "optimizer": None, "param_shapes": [{}, shapes]}
    return {made.model_name(0, 2): model} | {made.optim_name(r): {"optimizer_state_dict": told}
                                             for r in range(ranks)}


def long_names():
    """A long name in many groups, which share its number."""
    files = with_model(2, param_shapes=[made.OrderedDict(made.SHAPES) | {"n" * 60000: (0,)}])
    told = files[made.optim_name(0)]["optimizer_state_dict"]
    del told["param_alignment_paddings"]
    optim = told["base_optimizer_state"]
    optim["param_groups"] = [{"params": optim["param_groups"][0]["params"]}] * 5000
    return files


class Shell:
    def __reduce__(self):
        return os.system, ("touch /tmp/deepspeed-was-run",)


def wrong_rounding():
    files = made.plain_files("flat")
    files[made.model_name(0, 0)]["module"]["w"] = made.tensor([9.0] * 15, (3, 5), "e")
    return files


def of_step(stage, step, *names):
    """The optimizer or the engine is at another step in these files."""
    files = made.files(stage)
    for name in names:
        if "model" in name:
            files[name]["global_steps"] = step
            continue
        told = files[name]["optimizer_state_dict"]
        told["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"][0]["step"] = step
    return files


def twice(stage, name, other):
    """One rank's file twice."""
    files = made.files(stage)
    return files | {other: files[name]}


def in_files(others):
    """The first weight is not a member of the module, but of a layer or an expert in a file of its own."""
    names = [("3.w" if name == "w" else name, shape) for name, shape in made.SHAPES.items()]
    return with_model(2, param_shapes=[made.OrderedDict(names)], module={}, shared_params={}) | others


def contradictions():
    """Files of two saves in one tag, as a save leaves them that was cut short: as refusals()."""
    ranks, steps = [made.optim_name(rank) for rank in range(2)], "says 5; they are from different saves"
    models = [made.model_name(rank, 3) for rank in range(2)]
    for stage in (1, 2, 3):
        yield f"a rank of another step, {stage}", of_step(stage, 5, ranks[1]), DAMAGED, steps
        yield (f"optimizers of an older step, {stage}", of_step(stage, 5, *ranks), DAMAGED,
               "global_steps is 7, and")
        yield (f"optimizers of a newer step, {stage}", of_step(stage, 9, *ranks), DAMAGED,
               "its optimizer took 9 steps")
    yield "a model file of another step", of_step(3, 5, models[1]), DAMAGED, \
        f"{models[0]}' says that global_steps is 7, and"
    yield "another world", with_model(3, dp_world_size=9), DAMAGED, "dp_world_size is 9"
    yield "another number of samples", with_model(3, global_samples=[3]) | \
        {models[1]: made.model(1, 3) | {"global_samples": [4]}}, DAMAGED, "global_samples is [3]"
    yield "another number of skipped steps", with_model(3, skipped_steps=1) | \
        {models[1]: made.model(1, 3) | {"skipped_steps": 2}}, DAMAGED, "skipped_steps is 1, and"
    yield "another version", changed(2, 1, lambda optim: optim.update(ds_version="0.5")), DAMAGED, '"0.5"'
    yield "another stage", changed(2, 1, lambda optim: optim.update(zero_stage=1)), DAMAGED, "zero_stage is 2"
    yield "another count of partitions", changed(2, 1, lambda optim: optim.update(partition_count=2)), \
        DAMAGED, "partition_count is [2], and"
    yield "one rank twice", twice(3, *ranks), DAMAGED, f"{ranks[1]}' have the same master weights and moments"
    yield "one model file twice", twice(3, *models), DAMAGED, f"{models[1]}' have the same frozen weights"
    yield "one rank of stage 2 twice", twice(2, *ranks), DAMAGED, "'w' of its module differs from that of"
    weight = made.tensor([9.0] * 15, (3, 5), "e")
    yield ("a module of another step", with_model(2, module=made.OrderedDict(w=weight)), DAMAGED,
           "rounded to f16")
    yield ("model files of two stages", made.files(2) | {models[1]: made.model(1, 3)}, DAMAGED,
           f"stage 3, such as '{models[1]}'")
    yield "ranks of another world", with_model(2, dp_world_size=8), DAMAGED, "dp_world_size is 8, but"
    yield ("a layer of another step", in_files({"layer_03-model_states.pt": {"w": weight}}), DAMAGED,
           "layer_03-model_states.pt': the weight '3.w' of its module differs from that of")
    expert = "layer_0_expert_0_mp_rank_00_model_states.pt"
    yield ("an expert of another step", in_files({expert: {"3.w": weight}}), DAMAGED,
           f"{expert}': the weight '3.w' of its module differs from that of")
    yield ("an expert of another shape", in_files({expert: {"3.w": made.tensor([1.0], (1,), "e")}}), DAMAGED,
           f"{expert}': the weight '3.w'")
    both = {expert: {"3.w": weight}, expert.replace("expert_0", "expert_1"): {"3.w": weight}}
    yield "one expert twice", in_files(both), DAMAGED, "both have '3.w'"
    weight = made.tensor([9.0] * 5, (5,), "e")
    turned = with_model(2, module={"w": made.tensor(made.numbers_of("w"), (5, 3), "e")})
    yield "a weight of turned shape", turned, DAMAGED, "shape in param_shapes; they are from"
    yield "a weight of another shape", with_model(2, module={"w": weight}), DAMAGED, "shape in param_shapes"


def with_parallel(shape, rows, **more):
    """A universal checkpoint of two tensor-parallel ranks: "w" has this shape, in param_shapes `rows`."""
    files = made.universal_files(2)
    told = files[made.model_name(0, 2)]
    told |= {"checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": more.pop("ranks", 2)},
             "mp_world_size": 2, "param_shapes": [made.OrderedDict(made.SHAPES) | {"w": rows}],
             "module": {"other": told["module"]["other"]}}
    for file in ("fp32", "exp_avg"):
        count = shape[0] * shape[1]
        files[f"zero/w/{file}.pt"] = {"param": made.tensor([float(n) for n in range(count)], shape)} | more
    return files


def universal_contradictions():
    """Universal checkpoints whose folders are not those of their model files."""
    whole, name = {"param": made.tensor([1.0] * 15, (5, 3))}, made.model_name(0, 2)
    yield ("another shape than param_shapes", universal(2, "zero/w/fp32.pt", whole), DAMAGED,
           "zero/w/fp32.pt' has the shape [5, 3], but param_shapes of ")
    yield ("another number of dims", universal(2, "zero/w/fp32.pt", {"param": made.tensor([1.0] * 15)}),
           DAMAGED, "has the shape [15], but param_shapes")
    extra = universal(2, "zero/x/fp32.pt", whole)
    yield "a parameter of no model", extra, DAMAGED, "zero/x' is a parameter, but neither"
    both = extra | {made.model_name(0, 3): made.model(0, 3)}
    yield ("a trained parameter of no model", both | {"zero/x/exp_avg.pt": whole}, DAMAGED,
           "zero/x' is a parameter, but neither")
    yield "parts of other shapes", with_parallel((6, 10), (3, 5)), DAMAGED, "has the shape [6, 10]"
    yield "parts of pipelines alone", with_parallel((6, 5), (3, 5), ranks=1), DAMAGED, "has the shape [6, 5]"
    yield "fewer rows than a part", with_parallel((2, 5), (3, 5)), DAMAGED, "has the shape [2, 5]"
    yield "fewer rows", with_parallel((2, 5), (3, 5), ranks=1), DAMAGED, "has the shape [2, 5]"


def check_universal_shapes(folder):
    """The whole of tensor parallelism has more rows than a rank, and a vocabulary loses its padding."""
    for name, shape, rows, more in (("rows", (6, 5), (3, 5), {}), ("columns", (3, 10), (3, 5), {}),
                                    ("padding", (5, 5), (3, 5), {"vocab_tensor": True}),
                                    ("one rank", (2, 5), (3, 5), {"vocab_tensor": True, "ranks": 1})):
        told = listing(made.write(folder / name, with_parallel(shape, rows, **more)))
        found = told and told["tensors"].get("w", {}).get("shape")
        check(found == list(shape), f"a universal checkpoint of parts, {name}: {found}")


def check_weights_in_files(folder):
    """Rounded weights of layers and experts are those of their masters."""
    weight = made.tensor(made.numbers_of("w"), (3, 5), "e")
    for name, member in (("layer_03-model_states.pt", "w"),
                         ("layer_0_expert_0_mp_rank_00_model_states.pt", "3.w")):
        told = listing(made.write(folder / member, in_files({name: {member: weight}})))
        check(told and "3.w" in told["tensors"], f"{name}: {told}")


def check_began_anew(folder):
    """A run whose optimizer began again is read when the format is named; one that diverged is read."""
    path = made.write(folder / "anew", of_step(2, 5, *(made.optim_name(rank) for rank in range(2))))
    for options, status in ((), DAMAGED), (("--from", "deepspeed"), 0):
        ran = run("fsdp-convert", path, folder / "anew-out", "--to", "fsdp", *options)
        check(ran.returncode == status, f"an optimizer that began anew, {options}: {ran.stderr}")
    files, nan = made.files(2), float("nan")
    files[made.model_name(0, 2)]["module"]["b"] = made.tensor([nan] * 4, None, "e")
    for rank in range(2):
        masters = files[made.optim_name(rank)]["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        storage = masters[0].args[0]
        numbers = struct.unpack(f"<{storage.count}f", storage.data)
        masters[0] = made.tensor([nan if 15 <= at + 10 * rank < 19 else number
                                  for at, number in enumerate(numbers)])  # "b", after "w"
    fresh = made.files(3)
    for rank in range(2):  # equal masters, and moments that are zero
        told = fresh[made.optim_name(rank)]["optimizer_state_dict"]
        count = told["fp32_flat_groups"][0].args[0].count
        told["fp32_flat_groups"] = [made.tensor([float(n) for n in range(count)])]
        for kind in ("exp_avg", "exp_avg_sq"):
            told["optimizer_state_dict"]["state"][0][kind] = made.tensor([0.0] * count)
        fresh[made.model_name(rank, 3)]["module"] = {}
    ran = run("fsdp-ls", made.write(folder / "fresh", fresh))
    check(ran.returncode == 0, f"equal ranks that were not trained: {ran.stderr}")
    ran = run("fsdp-ls", made.write(folder / "nan", files))
    check(ran.returncode == 0, f"weights that are not a number: {ran.stderr}")


def refusals():
    """(what, files, status, words of the message)"""
    rank = made.optim_name
    yield "a rank is missing", without(2, rank(1)), DAMAGED, "rank_1_mp_rank_00_optim_states.pt"
    yield "the first rank is missing", without(2, rank(0)), DAMAGED, "the file of rank 0, before"
    yield "all ranks are missing", {made.model_name(0, 2): made.model(0, 2)}, DAMAGED, "the optimizer file of"
    yield ("a pipeline without ZeRO", {made.model_name(0, 0): made.model(0, 1) | {"module": None},
                                       "layer_00-model_states.pt": {}}, REFUSED, "a pipeline without ZeRO")
    yield "no model file", without(2, made.model_name(0, 2)), DAMAGED, "the model file of"
    yield "a model file is missing", without(3, made.model_name(1, 3)), DAMAGED, "ranks"
    yield "a rank is there twice", made.files(2) | {"bf16_" + rank(1): made.optim(1, 2)}, DAMAGED, "one rank"
    yield "another stage's ranks", made.files(2) | {rank(2): made.optim(1, 2)}, REFUSED, "partition_count"
    yield "more ranks are counted", counting(2, [3]), DAMAGED, "partition_count"
    yield "no ranks are counted", counting(2, [0]), DAMAGED, "partition_count"
    yield "ranks are no number", counting(3, "2"), DAMAGED, "partition_count"
    yield "half of the ranks, no experts", counting(2, [1]), REFUSED, "partition_count"
    yield "a longer parameter", other_shapes(w=(3, 50)), DAMAGED, "end inside parameter 'w'"
    yield "a shorter parameter", other_shapes(w=(1, 1)), DAMAGED, "more elements than the parameters"
    yield "a shape that overflows", other_shapes(w=(1 << 40, 1 << 40)), DAMAGED, "mp_rank_00"
    yield "a negative shape", other_shapes(w=(-3, 5)), DAMAGED, "sizes"
    yield "a shape of words", other_shapes(w="3x5"), DAMAGED, "sizes"
    yield "shapes that are none", with_model(2, param_shapes=[5]), DAMAGED, "param_shapes"
    yield "another number of groups", with_model(2, param_shapes=[made.SHAPES, {}]), DAMAGED, "groups"
    yield "a master that is no tensor", mastering([5]), DAMAGED, "master"
    yield "a master that is not flat", mastering([made.tensor([0.0] * 10, (2, 5))]), DAMAGED, "flat"
    yield "a short master", mastering([made.tensor([0.0] * 3)]), DAMAGED, "end inside parameter"
    yield "no master", mastering([]), DAMAGED, "state that belongs to no group"
    yield "a master of another dtype", mastering([made.tensor([0.0] * 10, None, "e")]), DAMAGED, "dtype"
    yield "a short master of stage 3", mastering([made.tensor([0.0] * 3)], 3), DAMAGED, "end inside parameter"
    yield "gaps of another group", with_gaps([[0]]), DAMAGED, "param_alignment_paddings"
    yield "negative gaps", with_gaps([[-1] * 4]), DAMAGED, "param_alignment_paddings"
    yield "large gaps", with_gaps([[1 << 62] * 4]), DAMAGED, "end inside parameter"
    yield "a state of no group", with_states({9: {}}), DAMAGED, "state"
    many = {f"moment{i}": made.tensor([0.0] * 10) for i in range(9)}
    yield "too many moments", with_states({0: many}), LIMIT, "moments"
    short, unknown = {"frozen": made.tensor([1.0])}, {"x": made.tensor([1.0])}
    yield "a short fragment", with_model(3, frozen_param_fragments=short), DAMAGED, "its part of 'frozen'"
    yield "an unknown fragment", with_model(3, frozen_param_fragments=unknown), DAMAGED, "frozen_param_shapes"
    yield "experts split by AutoEP", with_model(2, ds_autoep_layers=["moe"]), REFUSED, "AutoEP"
    yield "tied names that are none", with_model(2, shared_params={"tied": 5}), DAMAGED, "shared_params"
    yield "tensor parallelism", made.files(2) | {"mp_rank_01_model_states.pt": made.model(0, 2)}, REFUSED, \
        "tensor parallelism"
    yield "experts' own optimizer", made.files(2) | {"expp_rank_0_mp_rank_00_optim_states.pt": {}}, REFUSED, \
        "experts"
    yield "a call", with_model(2, note=Shell()), REFUSED, "nothing was run"
    yield "masters of another model", wrong_rounding(), DAMAGED, "round"
    yield "no master of a parameter", universal(1, "zero/w/fp32.pt", None), NOT_KNOWN, "zero/w"
    yield "a moment of another shape", universal(1, "zero/w/exp_avg.pt", {"param": made.tensor([1.0])}), \
        DAMAGED, "shape"
    yield "a master of another size", universal(3, "zero/w/fp32.pt", made.tensor([1.0])), DAMAGED, "elements"


def check_limits(folder):
    """Small files that would take much memory."""
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))

    more = {} if FEWER else {"preexec_fn": limit}  # sanitizers need the address space
    for what, files in ("experts", experts(4000, 200)), ("names", long_names()):
        ran = run("fsdp-convert", made.write(folder / what, files), folder / f"{what}.fsdp", **more)
        check(ran.returncode == LIMIT, f"{what}: status {ran.returncode}: {ran.stderr.strip()[:300]}")


def check_refusals(folder):
    cases = [*refusals(), *contradictions(), *universal_contradictions()]
    for number, (what, files, status, words) in enumerate(cases):
        ran = run("fsdp-ls", "--json", made.write(folder / str(number), files))
        check(ran.returncode == status and words in ran.stderr,
              f"{what}: status {ran.returncode}, not {status} with {words!r}: {ran.stderr.strip()}")
    check(not Path("/tmp/deepspeed-was-run").exists(), "a call was run")


def main():
    check_golden()
    for check_one in (check_universal_refused, check_universal_of_pytorch, check_paths, check_forms,
                      check_ranks, check_padding, check_lists_of_universal, check_own_steps,
                      check_names_of_the_module, check_unsure, check_universal_shapes,
                      check_weights_in_files, check_began_anew, check_refusals, check_limits):
        with tempfile.TemporaryDirectory() as folder:
            check_one(Path(folder))


main()
print("\n".join(problems) or "all as expected")
sys.exit(1 if problems else 0)
