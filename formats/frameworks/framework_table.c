/* The layouts of frameworks, as data: see frameworks.h. The first row whose markers are there counts. */
#include "formats/frameworks.h"

static const char load_flax[] =
    "load it in transformers 4 (5 has no Flax) with from_pretrained(DIR, from_flax=True) and save "
    "it again";

const fsdp_framework_row fsdp_framework_rows[] = {
    {.made_by = "Orbax",
     .markers = {"_CHECKPOINT_METADATA"},
     .say = "load it with orbax.checkpoint and save it with safetensors.flax"},
    {.made_by = "Orbax",
     .markers = {"manifest.ocdbt"},
     .say = "load it with orbax.checkpoint and save it with safetensors.flax"},
    {.made_by = "verl, SkyRL",
     .markers = {"model_world_size_{W}_rank_{r}.pt"},
     .member = "model_world_size_{W}_rank_{r}.pt",
     .parts = {{"optim_world_size_{W}_rank_{r}.pt", "optim", NULL},
               {"extra_state_world_size_{W}_rank_{r}.pt", "extra", NULL}}},
    {.made_by = "Accelerate (FSDP, use_dcp=False)",
     .markers = {"pytorch_model_fsdp_#_rank{r}.bin"},
     .member = "pytorch_model_fsdp_#_rank{r}.bin",
     .counts_models = true,
     .parts = {{"optimizer_#_rank{r}.bin", "optim", NULL}, {"scheduler.bin", "scheduler", NULL}},
     .others = "random_states_*"},
    {.made_by = "Accelerate (FSDP)",
     .markers = {"pytorch_model_fsdp_#"},
     .member = "pytorch_model_fsdp_#",
     .counts_models = true,
     .parts = {{"optimizer_#", "optim", "optimizer"}, {"scheduler.bin", "scheduler", NULL}},
     .others = "random_states_*"},
    {.made_by = "Accelerate (FSDP, full)",
     .markers = {"pytorch_model_fsdp.bin|pytorch_model_fsdp_#.bin"},
     .member = "pytorch_model_fsdp.bin|pytorch_model_fsdp_#.bin",
     .counts_models = true,
     .parts = {{"optimizer_#.bin", "optim", NULL},
               {"optimizer.bin", "optim", NULL},
               {"scheduler.bin", "scheduler", NULL}},
     .others = "random_states_*"},
    {.made_by = "nanochat",
     .markers = {"model_#.pt", "meta_#.json"},
     .member = "model_#.pt",
     .parts = {{"optim_#_rank{r}.pt", "optim", NULL}},
     .others = "optim_*.pt|meta_*.json"},
    {.made_by = "Nanotron",
     .markers = {"checkpoint_metadata.json", "model"},
     .member = "model",
     .others = "optimizer|lr_scheduler|random"},
    {.made_by = "torchtune",
     .markers = {"epoch_#", "recipe_state"},
     .member = "epoch_#",
     .parts = {{"recipe_state/recipe_state.pt", "", NULL}},
     .others = "recipe_state"},
    {.made_by = "Meta's Llama in several files",
     .markers = {"consolidated.*1.pth|consolidated.*2.pth|consolidated.*3.pth|consolidated.*4.pth|"
                 "consolidated.*5.pth|consolidated.*6.pth|consolidated.*7.pth|consolidated.*8.pth|"
                 "consolidated.*9.pth"},
     .member = "consolidated.{r}.pth",
     .yields = true},
    {.made_by = "Meta's Llama",
     .markers = {"consolidated.00.pth", "params.json"},
     .member = "consolidated.00.pth",
     .checked = "consolidated.{r}.pth"},
    {.made_by = "Trainer of transformers",
     .markers = {"trainer_state.json", "optimizer.pt", "*.safetensors|pytorch_model-*.bin"},
     .member = ".",
     .parts = {{"optimizer.pt", "optim", NULL}, {"scheduler.pt", "scheduler", NULL}},
     .others = "rng_state*|training_args.bin|trainer_state.json|scaler.pt"},
    {.made_by = "Trainer of transformers",
     .markers = {"trainer_state.json", "optimizer.pt", "pytorch_model.bin"},
     .member = "pytorch_model.bin",
     .parts = {{"optimizer.pt", "optim", NULL}, {"scheduler.pt", "scheduler", NULL}},
     .others = "rng_state*|training_args.bin|trainer_state.json|scaler.pt"},
    {.made_by = "timm",
     .markers = {"last.pth.tar"},
     .member = "last.pth.tar",
     .others = "checkpoint-#.pth.tar|model_best.pth.tar"},
    {.made_by = "Lightning",
     .markers = {"*step=#.ckpt"},
     .member = "*step=#.ckpt",
     .others = "last.ckpt"},
    {.made_by = "DeepSpeed", .markers = {"latest"}, .pointer = "latest"},
    {.made_by = "DeepSpeed (universal)",
     .markers = {"latest_universal"},
     .pointer = "latest_universal"},
    {.made_by = "Megatron-LM, verl",
     .markers = {"latest_checkpointed_iteration.txt"},
     .pointer = "latest_checkpointed_iteration.txt",
     .pointed = "iter_#|global_step_#"},
    {.made_by = "NeMo",
     .markers = {"weights", "context"},
     .member = "weights",
     .others = "context"},
    {.made_by = "Megatron-Core (Megatron-LM, NeMo)",
     .markers = {".metadata", "common.pt"},
     .member = ".",
     .parts = {{"common.pt", "common", NULL}},
     .is_one = true},
    {.made_by = "Megatron-LM",
     .markers = {"mp_rank_#|mp_rank_#_#|mp_rank_#_#_#"},
     .shards = "model_optim_rng.pt",
     .weights = "model.*|model#.*",
     .replicated = "*layernorm.*|*layer_norm_*|*final_norm.*|*.linear_proj.bias|*.linear_fc2.bias|"
                   "*.router.*|*position_embeddings.*",
     .agreed = "iteration|checkpoint_version|args.*_size|args.num_*|args.swiglu|args.normalization|"
               "args.kv_channels|args.*_head_dim|args.group_query_attention|args.add_*|"
               "args.*_embedding_type|args.rotary_*|args.untie_embeddings_and_output_weights|"
               "args.moe_*|args.*_lora_rank|args.bf16|args.fp16|args.consumed_*_samples|"
               "args.virtual_pipeline_model_parallel_size"},
    {.made_by = "Flax", .markers = {"flax_model.msgpack"}, .say = load_flax},
};
const size_t fsdp_framework_row_count = sizeof fsdp_framework_rows / sizeof *fsdp_framework_rows;

const fsdp_framework_file fsdp_framework_files[] = {
    {"git-lfs", "version https://git-lfs", 23, NULL,
     "it is a pointer to the weights and not the weights; get them with 'git lfs pull'"},
    {"llm.c", "\x8f\xd8\x34\x01", 4, ".bin",
     "it is a state of llm.c's optimizer, which only llm.c reads"},
    {"torch.export", "PK\3\4", 4, ".pt2",
     "it is a program; load it with torch.export.load and save its state_dict"},
    {"Flax", "", 0, ".msgpack", load_flax},
};
const size_t fsdp_framework_file_count = sizeof fsdp_framework_files / sizeof *fsdp_framework_files;

const char *const fsdp_framework_steps[] = {
    "checkpoint-#",    "checkpoint_#",    "step-#",  "step_#",    "global_step_#", "global_step#",
    "iter_#",          "epoch_#",         "epoch-#", "version_#", "epoch_#.pt",    "step_#.pt",
    "checkpoint-#.pt", "checkpoint_#.pt", "#",       NULL};

const char fsdp_framework_no_model[] =
    "optim*|scheduler*|rng*|random_states*|training_args*|trainer_state*|extra_state*|data.pt|"
    "scaler*|dataloader*|sampler*|recipe_state*|lr_sched*|meta.pt|common.pt";

const char fsdp_framework_weights[] =
    "*.safetensors|*.bin|*.pt|*.pth|*.ckpt|*.h5|*.hdf5|*.npz|*.gguf|*.tar|*.keras";
const char fsdp_framework_foreign_weights[] = "*.msgpack|*.tflite|*.onnx";

const char *const fsdp_framework_configs[] = {"huggingface", "hf_model", ".", NULL};
const char *const fsdp_framework_config_names[] = {"config.json", "adapter_config.json",
                                                   "params.json", "modules.json", NULL};

const char fsdp_framework_beside[] =
    "config.json|generation_config.json|merges.txt|added_tokens.json|special_tokens_map.json|"
    "preprocessor_config.json|processor_config.json|video_preprocessor_config.json|README.md|"
    "adapter_config.json|params.json|modules.json|config_sentence_transformers.json|"
    "sentence_*_config.json|wordembedding_config.json|*tokenizer_config.json|spiece.model|"
    "sentencepiece.bpe.model|tokenizer*|vocab.*|chat_template*|LICENSE*|NOTICE*|*.tiktoken";
const char fsdp_framework_not_beside[] =
    "*.safetensors|*.bin|*.pt|*.pth|*.ckpt|*.h5|*.hdf5|*.keras|*.npz|*.npy|*.gguf|*.onnx|*.tflite|"
    "*.msgpack|*.pkl|*.distcp|*.index.json";
const char fsdp_framework_pickles[] =
    "*.bin|*.pt|*.pth|*.ckpt|*.pkl|*.pickle|*.joblib|*.dill|*.npy|*.npz|*.h5|*.hdf5|*.keras";
const char fsdp_framework_module_list[] = "modules.json";
