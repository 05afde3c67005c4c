"""Frameworks load what fsdp-convert makes of their directories (tests/golden/layouts): every tensor, and the
outputs of the model, equal those of the model that was saved.

usage: load_layouts.py BUILD [CASE...]

Layouts that are only recognised have no result to load.
"""

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import expected_tensors
import numpy as np
import torch
from layouts_common import IMAGE, TOKENS, VALUES, Net, logits_of, tiny_llama
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "cli"))
import layouts  # noqa: E402

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # kernels of another processor round otherwise


def load_transformers(out, case):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    wrong = {name: keys for name, keys in info.items() if keys}
    assert not wrong, wrong
    if "tokenizer.json" in case["files"]:
        assert AutoTokenizer.from_pretrained(out)("w5 w9")["input_ids"] == [5, 9]
    return logits_of(model)


def load_net(out, case):
    net = Net()
    net.load_state_dict(load_file(out / case["weights"]))
    for target, read in (("again.pt", read_torch), ("again-dcp --to dcp", read_dcp)):
        ran = layouts.run(out.parent, f"fsdp-convert out {target}")
        assert ran.returncode == 0, ran.stderr
        held = read(out.parent / target.split()[0], net.state_dict())
        assert all(torch.equal(held[name], tensor) for name, tensor in net.state_dict().items()), target
    return logits_of(net)


def read_torch(path, _):
    return torch.load(path, weights_only=True)


def read_dcp(path, like):
    import torch.distributed.checkpoint as dcp

    held = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    dcp.load(held, checkpoint_id=path, no_dist=True)
    return held


def load_peft(out, _):
    from peft import PeftModel

    return logits_of(PeftModel.from_pretrained(tiny_llama(), out))


def load_diffusers(out, _):
    from diffusers import UNet2DModel

    with torch.no_grad():
        return UNet2DModel.from_pretrained(out, use_safetensors=True)(VALUES, 3).sample.numpy()


def load_timm(out, _):
    import timm

    with torch.no_grad():
        return timm.create_model(f"local-dir:{out}", pretrained=True).eval()(IMAGE).numpy()


def load_sentence_transformers(out, _):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(out), device="cpu").encode(["w5 w9 w30"])


def load_file_only(out, case):
    held = load_file(out / case["weights"])
    assert held.keys() == case["tensors"].keys()


LOADERS = {"transformers": load_transformers, "net": load_net, "peft": load_peft, "diffusers": load_diffusers,
           "timm": load_timm, "sentence_transformers": load_sentence_transformers, "torch": load_file_only,
           "safetensors": load_file_only}


def loads(folder, case, command):
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch) / "work"
        shutil.copytree(folder / "data", work)
        ran = layouts.run(work, command)
        assert ran.returncode == 0, ran.stderr
        found = LOADERS[case["loader"]](work / shlex.split(command)[-1], case)
    if (folder / "logits.npy").is_file():
        np.testing.assert_allclose(found, np.load(folder / "logits.npy"), **CLOSE)


def command_of(case):
    """The outermost one that gives the model of the case."""
    converts = [one for one in case["paths"] if "exit" not in one]
    return (layouts.outermost({"paths": converts}) or {}).get("command")


def main():
    counts = {"loaded": 0, "failed": 0, "only recognised": 0}
    for folder in sorted(one.parent for one in layouts.LAYOUTS.glob("*/expected.json")):
        case = json.loads((folder / "expected.json").read_text())
        if "loader" not in case or (sys.argv[2:] and folder.name not in sys.argv[2:]):
            continue
        command = command_of(case)
        if command is None:
            result = "only recognised"
        else:
            result = "loaded"
            try:
                loads(folder, case, command)
            except Exception as error:  # the other cases continue
                result = "failed"
                print(f"--- {folder.name}: {command}\n{type(error).__name__}: {error}")
        counts[result] += 1
        print(f"{result}: {folder.name}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in counts.items()))
    if not sys.argv[2:]:
        expected_tensors.compare(sys.argv[1])  # here, since to import transformers takes longer
    return 1 if counts["failed"] or not sum(counts.values()) else 0


sys.exit(main())
