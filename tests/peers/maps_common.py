"""Shared by the tests of maps: conversions, comparisons, small models. sys.argv[1] is fsdp-convert."""

import os
import subprocess
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CONVERT = sys.argv[1]
TOKENS = torch.tensor([[1, 5, 9, 2, 30, 7, 11, 3], [4, 4, 17, 21, 8, 0, 6, 2]])


def convert(*arguments):
    done = subprocess.run([CONVERT, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)
    compare(done.stdout, arguments)
    return done.stdout + done.stderr


def compare(printed, arguments):
    """Runs the fsdp-diff that a conversion with a map suggests: it finds source and result equal. It would
    lack the sizes where the config.json is next to neither."""
    line = printed.partition("\nnext  ")[2]
    if not line and "--copy-from" in arguments and "hf" not in arguments:
        return
    assert line, (arguments, printed)
    tools = f"{os.path.dirname(CONVERT)}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PATH": tools})
    assert done.returncode == 0 and not done.stdout.startswith("= 0"), (line, done.stdout, done.stderr)


def same(ours, theirs):
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, (name, ours[name].shape)
        assert torch.equal(ours[name], tensor), name


def read_dcp(path):
    """The tensors."""
    state = {}
    _load_state_dict(state, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(),
                     no_dist=True)
    return {name: value for name, value in state.items() if torch.is_tensor(value)}


def logits(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def check_model(path, model):
    """The model of a directory gives the outputs of the one that was saved, from the same tensors."""
    loaded, info = type(model).from_pretrained(path, output_loading_info=True)
    wrong = {key: names for key, names in info.items() if names}
    assert not wrong, wrong
    same(loaded.state_dict(), model.state_dict())
    assert torch.allclose(logits(loaded), logits(model), rtol=0, atol=1e-5)


def write_dcp(state, path):
    dcp.save(dict(state), checkpoint_id=path)


def sizes(**more):
    return dict(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
                num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=32, **more)


def gpt2():
    config = transformers.GPT2Config(vocab_size=250, n_embd=48, n_layer=2, n_head=4, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model


def run_cases(cases):
    """Runs those that sys.argv names, or all, each in a directory of its own."""
    for name in sys.argv[2:] or cases:
        torch.manual_seed(7)
        with tempfile.TemporaryDirectory() as directory:
            os.chdir(directory)
            cases[name]()
            os.chdir("/")
        print(f"{name}: equal", flush=True)
