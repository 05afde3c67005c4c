"""Cases of megatron_core.py: models of Megatron-Core on ranks (gloo, without a GPU), which it saves and loads
by its own dist_checkpointing, and models of transformers. All outputs and bits are equal."""

import contextlib
import os
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
import transformers
from maps_common import TOKENS, check_model, convert, logits, same, sizes
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import (get_default_save_sharded_strategy,
                                                            load_sharded_metadata)
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_layouts import (gpt2_layer, gpt2_outside, llama_layer, llama_mlp, llama_outside, megatron,
                              mixtral_mlp)
from safetensors.torch import load_file

CASES = {}
DEADLINE_S = 100
VOCAB = 256


def case(function):
    CASES[function.__name__] = function
    return function


# --- ranks ---------------------------------------------------------------------------------------------


class NoRandomness:
    """Megatron-Core keeps the random state of a GPU for dropout, of which there is none here."""

    @contextlib.contextmanager
    def fork(self, name=None):
        yield


def do_without_gpu():
    """Megatron-Core asks for the GPU where it waits for copies and sends a count, and for a name that only
    Transformer Engine brings. PyTorch 2.15 describes strides besides, which it does not expect."""
    empty = torch.empty
    torch.empty = lambda *arguments, strides=None, **more: empty(*arguments, **more)
    moe_utils.te_general_gemm = None
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.cuda = lambda tensor: tensor
    for module in list(sys.modules.values()):
        is_core = getattr(module, "__name__", "").startswith("megatron.core")
        if is_core and hasattr(module, "get_cuda_rng_tracker"):
            module.get_cuda_rng_tracker = lambda *_, **__: NoRandomness()


def run_rank(rank, world, stages, experts, function):
    do_without_gpu()
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=world // stages // experts, pipeline_model_parallel_size=stages,
        expert_model_parallel_size=experts, expert_tensor_parallel_size=1 if experts > 1 else None)
    torch.manual_seed(3)
    with torch.no_grad():
        function()
    dist.barrier()
    dist.destroy_process_group()


def start_rank(*arguments):
    process = os.fork()
    if process:
        return process
    os.setpgid(0, 0)
    code = 1
    try:
        run_rank(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def end_rank(process):
    """Ends it, and the processes that Megatron-Core starts for a save and leaves."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def on_ranks(world, function, stages=1, experts=1):
    """Forks the ranks and waits for them; what they tell each other goes through files."""
    with contextlib.suppress(FileNotFoundError):
        os.remove("store")
    left = {start_rank(rank, world, stages, experts, function) for rank in range(world)}
    failed, deadline = 0, time.monotonic() + DEADLINE_S
    while left and not failed and time.monotonic() < deadline:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process in left:
            left.remove(process)
            end_rank(process)
            failed = status
        elif not process:
            time.sleep(0.02)
    for process in left:
        end_rank(process)
        os.kill(process, signal.SIGKILL)  # it may have no group yet
        os.waitpid(process, 0)
    assert not failed and not left, "a rank has failed, or they did not end in time"


# --- models --------------------------------------------------------------------------------------------


def core_config(config, **more):
    return TransformerConfig(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, pipeline_dtype=torch.float32, masked_softmax_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(), **more)


def core_model(config, spec, tied, **more):
    is_gpt2 = config.model_type == "gpt2"
    return GPTModel(
        core_config(config, **more), spec, vocab_size=VOCAB,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied, parallel_output=False,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        rotary_base=10000 if is_gpt2 else config.rope_parameters["rope_theta"]).eval()


def core_llama(config, experts=0):
    more = {"num_moe_experts": experts, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none"} if experts else {}
    spec = get_gpt_layer_local_spec(num_experts=experts or None, moe_grouped_gemm=False,
                                    normalization="RMSNorm")
    return core_model(config, spec, config.tie_word_embeddings, num_query_groups=config.num_key_value_heads,
                      ffn_hidden_size=config.intermediate_size, gated_linear_unit=True,
                      activation_func=torch.nn.functional.silu, normalization="RMSNorm",
                      add_bias_linear=False, layernorm_epsilon=config.rms_norm_eps, **more)


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


def core_gpt2(config):
    return core_model(config, get_gpt_layer_local_spec(), True, layernorm_epsilon=config.layer_norm_epsilon,
                      activation_func=gelu)


def core_logits(model, path):
    """The last stage leaves them in a file."""
    length = TOKENS.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = dist.get_rank()
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(length, len(TOKENS), model.config.hidden_size)
        dist.recv(hidden, rank - ranks)
        model.set_input_tensor(hidden)
    out = model(TOKENS, torch.arange(length).repeat(len(TOKENS), 1), mask)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out.contiguous(), rank + ranks)
    elif rank == dist.get_world_size() - 1:
        torch.save(out, path)


def save(state, path, whole=False):
    """whole: ranks that hold the same share the work."""
    if dist.get_rank() == 0:
        os.makedirs(path)
    dist.barrier()
    strategy = get_default_save_sharded_strategy()
    dist_checkpointing.save(state, path, FullyParallelSaveStrategyWrapper(strategy) if whole else strategy)


def small(**more):
    return sizes(**more) | {"num_hidden_layers": 4}


def llama_config(**more):
    return transformers.LlamaConfig(**small(tie_word_embeddings=False, **more))


def check_equal(ours, theirs):
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5), (ours - theirs).abs().max()


# --- fsdp-convert reads ---------------------------------------------------------------------------------


@case
def a_model_of_megatron_becomes_one_of_transformers():
    config = llama_config()
    transformers.LlamaForCausalLM(config).save_pretrained("like")

    def train():
        model = core_llama(config)
        save({**model.sharded_state_dict(), "iteration": 7}, "core")
        core_logits(model, "logits")

    on_ranks(4, train, stages=2)
    convert("core", "out", "--copy-from", "like")
    check_equal(logits(transformers.LlamaForCausalLM.from_pretrained("out")), torch.load("logits")[..., :250])


@case
def experts_of_megatron_become_those_of_transformers():
    config = transformers.MixtralConfig(**small(num_local_experts=4, num_experts_per_tok=2))
    transformers.MixtralForCausalLM(config).save_pretrained("like")

    def train():
        model = core_llama(config, experts=4)
        save(model.sharded_state_dict(), "core")

    on_ranks(2, train, experts=2)

    def look():
        core_logits(restored(core_llama(config, experts=4), "core"), "logits")

    on_ranks(1, look)
    convert("core", "out", "--copy-from", "like")
    model = transformers.MixtralForCausalLM.from_pretrained("out")
    check_equal(logits(model), torch.load("logits")[..., :250])


def parts_of(tensor, key, rank, cuts):
    """A rank's part of a tensor, cut in the given dims; ranks count the last dim first."""
    offsets, part, replica = [], tensor, rank
    for dim, count in reversed(cuts):
        number = replica % count
        replica //= count
        part = part.chunk(count, dim)[number]
        offsets.append((dim, number, count))
    return ShardedTensor.from_rank_offsets(key, part.contiguous(), *offsets, replica_id=replica)


def tensors_by_hand():
    torch.manual_seed(11)
    return {"rows": torch.randn(8, 6), "columns": torch.randn(3, 8).bfloat16(), "grid": torch.randn(4, 10),
            "whole": torch.arange(7), "scalar": torch.tensor(2.5, dtype=torch.float64),
            "optimizer.state.exp_avg.rows": torch.randn(8, 6), "bytes": torch.arange(16, dtype=torch.uint8)}


@case
def shards_by_hand_are_read():
    tensors, stacked = tensors_by_hand(), torch.randn(4, 6, 8)

    def write(path, whole):
        rank, world = dist.get_rank(), dist.get_world_size()
        cuts = {"rows": [(0, world)], "columns": [(1, world)], "grid": [(0, world // 2), (1, 2)],
                "optimizer.state.exp_avg.rows": [(0, world)], "bytes": [(0, 2)]}
        state = {f"model.{key}": parts_of(tensor, key, rank, cuts.get(key, []))
                 for key, tensor in tensors.items()}
        stages = world // 2  # the layers of a stage, each cut in two
        for layer in range(rank // 2 * 4 // stages, (rank // 2 + 1) * 4 // stages):
            state[f"layer.{layer}"] = ShardedTensor.from_rank_offsets(
                "layers", stacked[layer].chunk(2)[rank % 2].contiguous(), (0, layer, 4), (1, rank % 2, 2),
                prepend_axis_num=1)
        state["random"] = ShardedObject("random", {"seed": rank, "of": world}, (world,), (rank,))
        save({**state, "iteration": 7, "names": ["a", "b"]}, path, whole)

    for world, whole in ((2, False), (4, True)):
        path = f"core{world}"
        on_ranks(world, lambda: write(path, whole))
        convert(path, f"{path}.safetensors", "--drop", "values", "--only", "all")
        same(load_file(f"{path}.safetensors"), {**tensors, "layers": stacked})
        convert(path, f"{path}.pt", "--include", r"^common\.|^random/")
        told = torch.load(f"{path}.pt")
        assert told["common"] == {"iteration": 7, "names": ["a", "b"]}, told["common"]
        for rank in range(world):
            assert told[f"random/shard_{rank}_{world}"] == [{"seed": rank, "of": world}], told


# --- fsdp-convert writes --------------------------------------------------------------------------------


def stacked_model(model):
    """The tensors that Megatron-Core has of a model of transformers."""
    state, config = model.state_dict(), model.config
    if config.model_type == "gpt2":
        layers = [gpt2_layer(state, i, config.n_head) for i in range(config.n_layer)]
        return megatron(layers, gpt2_outside(model))
    mlp = mixtral_mlp if config.model_type == "mixtral" else llama_mlp
    layers = [{**llama_layer(state, i, config), **mlp(state, i)} for i in range(config.num_hidden_layers)]
    return megatron(layers, llama_outside(model))


def restored(model, path):
    state = model.sharded_state_dict()
    loaded = dist_checkpointing.load(state, path)  # an error if it lacks one of them
    model.load_state_dict({key: loaded[key] for key in state}, strict=False)
    return model


def objects_of(expected):
    """An object of each module that may compute in fp8: for each layer, or expert of a layer."""
    out = {"decoder.final_layernorm._extra_state/shard_0_1"}
    for key, tensor in expected.items():
        module, _, kind = key.rpartition(".")
        layers = len(tensor)
        if kind != "weight" or not key.startswith("decoder.layers.") or module.endswith("router"):
            continue
        places = [f"{i}_{layers}" for i in range(layers)]
        if ".experts." in key:
            experts = tensor.shape[1]
            places = [f"{i}.{e}_{layers}.{experts}" for i in range(layers) for e in range(experts)]
        modules = [module] + ["decoder.layers.self_attention.core_attention"] * module.endswith("linear_qkv")
        out |= {f"{each}._extra_state/shard_{place}" for each in modules for place in places}
    return out


def check_plain(path, expected):
    """Megatron-Core reads the same without a model."""
    described = dist_checkpointing.load_tensors_metadata(path)
    assert {key: tuple(tensor.global_shape) for key, tensor in described.items()} == \
        {key: tuple(tensor.shape) for key, tensor in expected.items()}
    objects = set(load_sharded_metadata(path)) - set(expected)
    assert objects == objects_of(expected), objects ^ objects_of(expected)
    common = dist_checkpointing.load_common_state_dict(path)
    assert common == {"checkpoint_version": 3.0, "iteration": 0}, common
    loaded = dist_checkpointing.load_plain_tensors(path)
    same({key: loaded[key] for key in expected}, expected)


def check_cut(path, expected):
    """Each tensor of all ranks, cut in its last dim, or whole where that cannot be divided."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state, wanted = {}, {}
    for key, tensor in expected.items():
        cuts = [(tensor.ndim - 1, world)] if tensor.shape[-1] % world == 0 else []
        wanted[key] = parts_of(tensor, key, rank, cuts)
        state[key] = wanted[key].without_data()
    loaded = dist_checkpointing.load(state, path)
    same({key: loaded[key] for key in expected}, {key: shard.data for key, shard in wanted.items()})


def check_loads(model, make, name, worlds):
    """worlds: ranks and stages."""
    model.save_pretrained("hf")
    convert("hf", "core", "--to", "dcp", "--map", name, "--world-size", "3")
    convert("hf", "by_itself", "--to", "megatron")
    expected = stacked_model(model)
    on_ranks(1, lambda: (check_plain("core", expected), check_plain("by_itself", expected)))
    on_ranks(4, lambda: check_cut("core", expected))
    for world, stages in worlds:
        on_ranks(world, lambda: core_logits(restored(make(), "core"), "logits"), stages=stages)
        check_equal(torch.load("logits")[..., :250], logits(model))
    convert("core", "back", "--copy-from", "hf")
    check_model("back", model)


@case
def llama_is_loaded():
    config = llama_config()
    check_loads(transformers.LlamaForCausalLM(config), lambda: core_llama(config), "megatron-llama",
                [(2, 1), (4, 2)])


@case
def mixtral_is_described():
    """Its experts lie in one tensor, and their objects have two numbers."""
    config = transformers.MixtralConfig(**small(num_local_experts=3, num_experts_per_tok=2))
    model = transformers.MixtralForCausalLM(config)
    model.save_pretrained("hf")
    convert("hf", "core", "--to", "megatron")
    on_ranks(1, lambda: check_plain("core", stacked_model(model)))


@case
def gpt2_is_loaded():
    config = transformers.GPT2Config(vocab_size=250, n_embd=64, n_layer=4, n_head=4, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    check_loads(model, lambda: core_gpt2(config), "megatron-gpt2", [(4, 2)])
