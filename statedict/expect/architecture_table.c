/* The architectures of Hugging Face's transformers, versions 4 and 5: see architecture.h.
 * tests/peers/expected_tensors.py compares every row with models that transformers builds and saves. */
#include "statedict/expect/architecture.h"

#include <string.h>

#define LAYER "{base}layers.{layer}."
#define TIED "tie_word_embeddings"

/* --- heads -------------------------------------------------------------------------------------- */

const fsdp_config_member fsdp_config_common[] = {{"vocab_size", "32000"},
                                                 {"hidden_size", "4096"},
                                                 {"num_hidden_layers", "32"},
                                                 {"num_attention_heads", "32"},
                                                 {"num_key_value_heads", "num_attention_heads"},
                                                 {"intermediate_size", "11008"},
                                                 {"head_dim", "hidden_size / num_attention_heads"},
                                                 {"tie_word_embeddings", "0"},
                                                 {"attention_bias", "0"},
                                                 {"mlp_bias", "0"},
                                                 {"id2label", "num_labels"},
                                                 {"num_labels", "2"},
                                                 {"$labels", "id2label"},
                                                 {"$width", "hidden_size"},
                                                 {"$layers", "num_hidden_layers"},
                                                 {"$experts", "0"},
                                                 {"$qkv_bias", "attention_bias"},
                                                 {"$o_bias", "attention_bias"},
                                                 {"$sparse", "0"},
                                                 {0}};

static const fsdp_tensor_row causal_heads[] = {
    {"lm_head.weight", "vocab_size, $width", "'ForCausalLM' || 'LMHeadModel' || 'DoubleHeadsModel'",
     TIED, 0},
    {0}};

static const fsdp_tensor_row task_heads[] = {
    {"score.weight", "$labels, $width", "'ForSequenceClassification'", NULL, 0},
    {"qa_outputs.weight", "2, $width", "'ForQuestionAnswering'", NULL, 0},
    {"qa_outputs.bias", "2", "'ForQuestionAnswering'", NULL, 0},
    {0}};

static const fsdp_tensor_row score_tokens[] = {
    {"score.weight", "$labels, $width", "'ForTokenClassification'", NULL, 0},
    {"score.bias", "$labels", "'ForTokenClassification'", NULL, 0},
    {0}};

static const fsdp_tensor_row classify_tokens[] = {
    {"classifier.weight", "$labels, $width", "'ForTokenClassification'", NULL, 0},
    {"classifier.bias", "$labels", "'ForTokenClassification'", NULL, 0},
    {0}};

/* --- llama and its kin -------------------------------------------------------------------------- */

static const fsdp_tensor_row llama_rows[] = {
    {"{base}embed_tokens.weight", "vocab_size, hidden_size", NULL, NULL, 0},
    {"{base}norm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "input_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "post_attention_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "self_attn.o_proj.weight", "hidden_size, num_attention_heads * head_dim", NULL, NULL, 0},
    /* buffers of early versions */
    {LAYER "self_attn.rotary_emb.inv_freq", "?", NULL, "1", 0},
    {"{base}rotary_emb.inv_freq", "?", NULL, "1", 0},
    {0}};

static const fsdp_tensor_row attention_rows[] = {
    {LAYER "self_attn.q_proj.weight", "num_attention_heads * head_dim, hidden_size", NULL, NULL, 0},
    {LAYER "self_attn.k_proj.weight", "num_key_value_heads * head_dim, hidden_size", NULL, NULL, 0},
    {LAYER "self_attn.v_proj.weight", "num_key_value_heads * head_dim, hidden_size", NULL, NULL, 0},
    {LAYER "self_attn.q_proj.bias", "num_attention_heads * head_dim", "$qkv_bias", NULL, 0},
    {LAYER "self_attn.k_proj.bias", "num_key_value_heads * head_dim", "$qkv_bias", NULL, 0},
    {LAYER "self_attn.v_proj.bias", "num_key_value_heads * head_dim", "$qkv_bias", NULL, 0},
    {LAYER "self_attn.o_proj.bias", "hidden_size", "$o_bias", NULL, 0},
    {0}};

static const fsdp_tensor_row mlp_rows[] = {
    {LAYER "mlp.gate_proj.weight", "intermediate_size, hidden_size", "!$sparse", NULL, 0},
    {LAYER "mlp.up_proj.weight", "intermediate_size, hidden_size", "!$sparse", NULL, 0},
    {LAYER "mlp.down_proj.weight", "hidden_size, intermediate_size", "!$sparse", NULL, 0},
    {LAYER "mlp.gate_proj.bias", "intermediate_size", "mlp_bias", NULL, 0},
    {LAYER "mlp.up_proj.bias", "intermediate_size", "mlp_bias", NULL, 0},
    {LAYER "mlp.down_proj.bias", "hidden_size", "mlp_bias", NULL, 0},
    {0}};

static const fsdp_tensor_row head_norm_rows[] = {
    {LAYER "self_attn.q_norm.weight", "head_dim", NULL, NULL, 0},
    {LAYER "self_attn.k_norm.weight", "head_dim", NULL, NULL, 0},
    {0}};

static const fsdp_config_member mistral_members[] = {{"num_key_value_heads", "8"},
                                                     {"intermediate_size", "14336"},
                                                     {"$qkv_bias", "0"},
                                                     {"$o_bias", "0"},
                                                     {0}};

/* --- mixtures of experts ------------------------------------------------------------------------ */

static const fsdp_config_member mixtral_members[] = {{"num_key_value_heads", "8"},
                                                     {"intermediate_size", "14336"},
                                                     {"num_local_experts", "num_experts"},
                                                     {"num_experts", "8"},
                                                     {"$experts", "num_local_experts"},
                                                     {"$qkv_bias", "0"},
                                                     {"$o_bias", "0"},
                                                     {0}};

#define MIXTRAL LAYER "block_sparse_moe."
static const fsdp_tensor_row mixtral_rows[] = {
    {MIXTRAL "gate.weight", "$experts, hidden_size", NULL, NULL, 1},
    {MIXTRAL "experts.{expert}.w1.weight", "intermediate_size, hidden_size", NULL, NULL, 1},
    {MIXTRAL "experts.{expert}.w2.weight", "hidden_size, intermediate_size", NULL, NULL, 1},
    {MIXTRAL "experts.{expert}.w3.weight", "intermediate_size, hidden_size", NULL, NULL, 1},
    {LAYER "mlp.gate.weight", "$experts, hidden_size", NULL, NULL, 2},
    {LAYER "mlp.experts.gate_up_proj", "$experts, 2 * intermediate_size, hidden_size", NULL, NULL,
     2},
    {LAYER "mlp.experts.down_proj", "$experts, hidden_size, intermediate_size", NULL, NULL, 2},
    {0}};

#define QWEN_SPARSE \
    "!(layer in mlp_only_layers) && $experts > 0 && (layer + 1) % decoder_sparse_step == 0"
static const fsdp_tensor_row qwen_expert_rows[] = {
    {LAYER "mlp.gate.weight", "$experts, hidden_size", "$sparse", NULL, 0},
    {LAYER "mlp.experts.{expert}.gate_proj.weight", "moe_intermediate_size, hidden_size", "$sparse",
     NULL, 1},
    {LAYER "mlp.experts.{expert}.up_proj.weight", "moe_intermediate_size, hidden_size", "$sparse",
     NULL, 1},
    {LAYER "mlp.experts.{expert}.down_proj.weight", "hidden_size, moe_intermediate_size", "$sparse",
     NULL, 1},
    {LAYER "mlp.experts.gate_up_proj", "$experts, 2 * moe_intermediate_size, hidden_size",
     "$sparse", NULL, 2},
    {LAYER "mlp.experts.down_proj", "$experts, hidden_size, moe_intermediate_size", "$sparse", NULL,
     2},
    {LAYER "mlp.shared_expert.gate_proj.weight", "shared_expert_intermediate_size, hidden_size",
     "$sparse && $shared", NULL, 0},
    {LAYER "mlp.shared_expert.up_proj.weight", "shared_expert_intermediate_size, hidden_size",
     "$sparse && $shared", NULL, 0},
    {LAYER "mlp.shared_expert.down_proj.weight", "hidden_size, shared_expert_intermediate_size",
     "$sparse && $shared", NULL, 0},
    {LAYER "mlp.shared_expert_gate.weight", "1, hidden_size", "$sparse && $shared", NULL, 0},
    {0}};

static const fsdp_config_member qwen2_moe_members[] = {{"vocab_size", "151936"},
                                                       {"hidden_size", "2048"},
                                                       {"num_hidden_layers", "24"},
                                                       {"num_attention_heads", "16"},
                                                       {"num_key_value_heads", "16"},
                                                       {"intermediate_size", "5632"},
                                                       {"num_experts", "num_local_experts"},
                                                       {"num_local_experts", "60"},
                                                       {"moe_intermediate_size", "1408"},
                                                       {"shared_expert_intermediate_size", "5632"},
                                                       {"decoder_sparse_step", "1"},
                                                       {"mlp_only_layers", NULL},
                                                       {"qkv_bias", "1"},
                                                       {"$experts", "num_experts"},
                                                       {"$sparse", QWEN_SPARSE},
                                                       {"$shared", "1"},
                                                       {"$qkv_bias", "qkv_bias"},
                                                       {"$o_bias", "0"},
                                                       {0}};

static const fsdp_config_member qwen3_moe_members[] = {{"vocab_size", "151936"},
                                                       {"hidden_size", "2048"},
                                                       {"num_hidden_layers", "24"},
                                                       {"num_key_value_heads", "4"},
                                                       {"intermediate_size", "6144"},
                                                       {"num_experts", "num_local_experts"},
                                                       {"num_local_experts", "128"},
                                                       {"moe_intermediate_size", "768"},
                                                       {"decoder_sparse_step", "1"},
                                                       {"mlp_only_layers", NULL},
                                                       {"$experts", "num_experts"},
                                                       {"$sparse", QWEN_SPARSE},
                                                       {"$shared", "0"},
                                                       {0}};

/* --- qwen, gemma, phi --------------------------------------------------------------------------- */

static const fsdp_config_member qwen2_members[] = {{"vocab_size", "151936"},
                                                   {"intermediate_size", "22016"},
                                                   {"num_key_value_heads", "32"},
                                                   {"$qkv_bias", "1"},
                                                   {"$o_bias", "0"},
                                                   {0}};
static const fsdp_config_member qwen3_members[] = {{"vocab_size", "151936"},
                                                   {"intermediate_size", "22016"},
                                                   {"num_key_value_heads", "32"},
                                                   {"head_dim", "128"},
                                                   {0}};
static const fsdp_config_member gemma_members[] = {
    {"vocab_size", "256000"},    {"hidden_size", "3072"},       {"intermediate_size", "24576"},
    {"num_hidden_layers", "28"}, {"num_attention_heads", "16"}, {"num_key_value_heads", "16"},
    {"head_dim", "256"},         {"tie_word_embeddings", "1"},  {0}};
static const fsdp_config_member gemma2_members[] = {
    {"vocab_size", "256000"},    {"hidden_size", "2304"},      {"intermediate_size", "9216"},
    {"num_hidden_layers", "26"}, {"num_attention_heads", "8"}, {"num_key_value_heads", "4"},
    {"head_dim", "256"},         {"tie_word_embeddings", "1"}, {0}};
static const fsdp_tensor_row gemma2_rows[] = {
    {LAYER "pre_feedforward_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "post_feedforward_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {0}};

static const fsdp_config_member phi3_members[] = {
    {"vocab_size", "32064"}, {"hidden_size", "3072"}, {"intermediate_size", "8192"}, {0}};
static const fsdp_tensor_row phi3_rows[] = {
    {LAYER "self_attn.qkv_proj.weight",
     "(num_attention_heads + 2 * num_key_value_heads) * head_dim, hidden_size", NULL, NULL, 0},
    {LAYER "mlp.gate_up_proj.weight", "2 * intermediate_size, hidden_size", NULL, NULL, 0},
    {LAYER "mlp.down_proj.weight", "hidden_size, intermediate_size", NULL, NULL, 0},
    {0}};

/* --- gpt2 --------------------------------------------------------------------------------------- */

static const fsdp_config_member gpt2_members[] = {{"vocab_size", "50257"},
                                                  {"n_positions", "max_position_embeddings"},
                                                  {"max_position_embeddings", "1024"},
                                                  {"n_embd", "hidden_size"},
                                                  {"hidden_size", "768"},
                                                  {"n_layer", "num_hidden_layers"},
                                                  {"num_hidden_layers", "12"},
                                                  {"n_inner", "4 * n_embd"},
                                                  {"add_cross_attention", "0"},
                                                  {"summary_use_proj", "1"},
                                                  {"tie_word_embeddings", "1"},
                                                  {"$width", "n_embd"},
                                                  {"$layers", "n_layer"},
                                                  {0}};

#define BLOCK "{base}h.{layer}."
static const fsdp_tensor_row gpt2_rows[] = {
    {"{base}wte.weight", "vocab_size, n_embd", NULL, NULL, 0},
    {"{base}wpe.weight", "n_positions, n_embd", NULL, NULL, 0},
    {"{base}ln_f.weight", "n_embd", NULL, NULL, 0},
    {"{base}ln_f.bias", "n_embd", NULL, NULL, 0},
    {BLOCK "ln_1.weight", "n_embd", NULL, NULL, 0},
    {BLOCK "ln_1.bias", "n_embd", NULL, NULL, 0},
    {BLOCK "ln_2.weight", "n_embd", NULL, NULL, 0},
    {BLOCK "ln_2.bias", "n_embd", NULL, NULL, 0},
    {BLOCK "attn.c_attn.weight", "n_embd, 3 * n_embd", NULL, NULL, 0},
    {BLOCK "attn.c_attn.bias", "3 * n_embd", NULL, NULL, 0},
    {BLOCK "attn.c_proj.weight", "n_embd, n_embd", NULL, NULL, 0},
    {BLOCK "attn.c_proj.bias", "n_embd", NULL, NULL, 0},
    {BLOCK "mlp.c_fc.weight", "n_embd, n_inner", NULL, NULL, 0},
    {BLOCK "mlp.c_fc.bias", "n_inner", NULL, NULL, 0},
    {BLOCK "mlp.c_proj.weight", "n_inner, n_embd", NULL, NULL, 0},
    {BLOCK "mlp.c_proj.bias", "n_embd", NULL, NULL, 0},
    {BLOCK "attn.bias", "?", NULL, "1", 0}, /* masks of early versions */
    {BLOCK "attn.masked_bias", "?", NULL, "1", 0},
    {"multiple_choice_head.summary.weight", "1, n_embd", "'DoubleHeadsModel' && summary_use_proj",
     NULL, 0},
    {"multiple_choice_head.summary.bias", "1", "'DoubleHeadsModel' && summary_use_proj", NULL, 0},
    {0}};
static const fsdp_tensor_row gpt2_cross_rows[] = {
    {BLOCK "ln_cross_attn.weight", "n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "ln_cross_attn.bias", "n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.c_attn.weight", "n_embd, 2 * n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.c_attn.bias", "2 * n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.q_attn.weight", "n_embd, n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.q_attn.bias", "n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.c_proj.weight", "n_embd, n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.c_proj.bias", "n_embd", "add_cross_attention", NULL, 0},
    {BLOCK "crossattention.bias", "?", NULL, "1", 0},
    {BLOCK "crossattention.masked_bias", "?", NULL, "1", 0},
    {0}};

/* --- opt ---------------------------------------------------------------------------------------- */

static const fsdp_config_member opt_members[] = {
    {"vocab_size", "50272"},
    {"hidden_size", "768"},
    {"num_hidden_layers", "12"},
    {"ffn_dim", "3072"},
    {"max_position_embeddings", "2048"},
    {"do_layer_norm_before", "1"},
    {"_remove_final_layer_norm", "0"},
    {"word_embed_proj_dim", "hidden_size"},
    {"enable_bias", "1"},
    {"layer_norm_elementwise_affine", "1"},
    {"tie_word_embeddings", "1"},
    {"$width", "word_embed_proj_dim"},
    {"$affine", "layer_norm_elementwise_affine"},
    {"$projects", "word_embed_proj_dim != hidden_size"},
    {0}};

#define DECODER "{base}decoder."
#define OPT DECODER "layers.{layer}."
#define OPT_FINAL "do_layer_norm_before && !_remove_final_layer_norm && $affine"
static const fsdp_tensor_row opt_rows[] = {
    {DECODER "embed_tokens.weight", "vocab_size, word_embed_proj_dim", NULL, NULL, 0},
    {DECODER "embed_positions.weight", "max_position_embeddings + 2, hidden_size", NULL, NULL, 0},
    {DECODER "project_in.weight", "hidden_size, word_embed_proj_dim", "$projects", NULL, 0},
    {DECODER "project_out.weight", "word_embed_proj_dim, hidden_size", "$projects", NULL, 0},
    {DECODER "final_layer_norm.weight", "hidden_size", OPT_FINAL, NULL, 0},
    {DECODER "final_layer_norm.bias", "hidden_size", OPT_FINAL, NULL, 0},
    {OPT "self_attn.q_proj.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {OPT "self_attn.k_proj.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {OPT "self_attn.v_proj.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {OPT "self_attn.out_proj.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {OPT "self_attn.q_proj.bias", "hidden_size", "enable_bias", NULL, 0},
    {OPT "self_attn.k_proj.bias", "hidden_size", "enable_bias", NULL, 0},
    {OPT "self_attn.v_proj.bias", "hidden_size", "enable_bias", NULL, 0},
    {OPT "self_attn.out_proj.bias", "hidden_size", "enable_bias", NULL, 0},
    {OPT "fc1.weight", "ffn_dim, hidden_size", NULL, NULL, 0},
    {OPT "fc2.weight", "hidden_size, ffn_dim", NULL, NULL, 0},
    {OPT "fc1.bias", "ffn_dim", "enable_bias", NULL, 0},
    {OPT "fc2.bias", "hidden_size", "enable_bias", NULL, 0},
    {OPT "self_attn_layer_norm.weight", "hidden_size", "$affine", NULL, 0},
    {OPT "self_attn_layer_norm.bias", "hidden_size", "$affine", NULL, 0},
    {OPT "final_layer_norm.weight", "hidden_size", "$affine", NULL, 0},
    {OPT "final_layer_norm.bias", "hidden_size", "$affine", NULL, 0},
    {0}};

/* --- gpt_neox ----------------------------------------------------------------------------------- */

static const fsdp_config_member gpt_neox_members[] = {{"vocab_size", "50432"},
                                                      {"hidden_size", "6144"},
                                                      {"num_hidden_layers", "44"},
                                                      {"num_attention_heads", "64"},
                                                      {"intermediate_size", "24576"},
                                                      {"attention_bias", "1"},
                                                      {0}};

static const fsdp_tensor_row gpt_neox_rows[] = {
    {"{base}embed_in.weight", "vocab_size, hidden_size", NULL, NULL, 0},
    {"{base}final_layer_norm.weight", "hidden_size", NULL, NULL, 0},
    {"{base}final_layer_norm.bias", "hidden_size", NULL, NULL, 0},
    {LAYER "input_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "input_layernorm.bias", "hidden_size", NULL, NULL, 0},
    {LAYER "post_attention_layernorm.weight", "hidden_size", NULL, NULL, 0},
    {LAYER "post_attention_layernorm.bias", "hidden_size", NULL, NULL, 0},
    {LAYER "attention.query_key_value.weight", "3 * hidden_size, hidden_size", NULL, NULL, 0},
    {LAYER "attention.query_key_value.bias", "3 * hidden_size", "attention_bias", NULL, 0},
    {LAYER "attention.dense.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {LAYER "attention.dense.bias", "hidden_size", "attention_bias", NULL, 0},
    {LAYER "mlp.dense_h_to_4h.weight", "intermediate_size, hidden_size", NULL, NULL, 0},
    {LAYER "mlp.dense_h_to_4h.bias", "intermediate_size", NULL, NULL, 0},
    {LAYER "mlp.dense_4h_to_h.weight", "hidden_size, intermediate_size", NULL, NULL, 0},
    {LAYER "mlp.dense_4h_to_h.bias", "hidden_size", NULL, NULL, 0},
    {LAYER "attention.bias", "?", NULL, "1", 0}, /* buffers of early versions */
    {LAYER "attention.masked_bias", "?", NULL, "1", 0},
    {LAYER "attention.rotary_emb.inv_freq", "?", NULL, "1", 0},
    {"embed_out.weight", "vocab_size, hidden_size", "'ForCausalLM'", TIED, 1},
    {"lm_head.weight", "vocab_size, hidden_size", "'ForCausalLM'", TIED, 2},
    {0}};

/* --- bert --------------------------------------------------------------------------------------- */

/* A model for language has no pooler, and one for embeddings may be made without, but checkpoints of the
 * first BERT have all heads. */
#define BERT_LM "'ForMaskedLM' || 'LMHeadModel' || 'ForPreTraining'"
#define BERT_UNPOOLED \
    "'ForMaskedLM' || 'Model' || 'ForTokenClassification' || 'ForQuestionAnswering'"
static const fsdp_config_member bert_members[] = {{"vocab_size", "30522"},
                                                  {"hidden_size", "768"},
                                                  {"num_hidden_layers", "12"},
                                                  {"intermediate_size", "3072"},
                                                  {"max_position_embeddings", "512"},
                                                  {"type_vocab_size", "2"},
                                                  {"add_cross_attention", "0"},
                                                  {"tie_word_embeddings", "1"},
                                                  {"$lm", BERT_LM},
                                                  {"$unpooled", BERT_UNPOOLED},
                                                  {0}};

#define EMBEDDINGS "{base}embeddings."
#define BERT "{base}encoder.layer.{layer}."
static const fsdp_tensor_row bert_rows[] = {
    {EMBEDDINGS "word_embeddings.weight", "vocab_size, hidden_size", NULL, NULL, 0},
    {EMBEDDINGS "position_embeddings.weight", "max_position_embeddings, hidden_size", NULL, NULL,
     0},
    {EMBEDDINGS "token_type_embeddings.weight", "type_vocab_size, hidden_size", NULL, NULL, 0},
    {EMBEDDINGS "position_ids", "?", NULL, "1", 0},
    {BERT "attention.self.query.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {BERT "attention.self.query.bias", "hidden_size", NULL, NULL, 0},
    {BERT "attention.self.key.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {BERT "attention.self.key.bias", "hidden_size", NULL, NULL, 0},
    {BERT "attention.self.value.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {BERT "attention.self.value.bias", "hidden_size", NULL, NULL, 0},
    {BERT "attention.output.dense.weight", "hidden_size, hidden_size", NULL, NULL, 0},
    {BERT "attention.output.dense.bias", "hidden_size", NULL, NULL, 0},
    {BERT "intermediate.dense.weight", "intermediate_size, hidden_size", NULL, NULL, 0},
    {BERT "intermediate.dense.bias", "intermediate_size", NULL, NULL, 0},
    {BERT "output.dense.weight", "hidden_size, intermediate_size", NULL, NULL, 0},
    {BERT "output.dense.bias", "hidden_size", NULL, NULL, 0},
    {0}};

/* Early versions called the two gamma and beta. */
static const fsdp_tensor_row bert_norm_rows[] = {
    {EMBEDDINGS "LayerNorm.weight", "hidden_size", NULL, NULL, 1},
    {EMBEDDINGS "LayerNorm.bias", "hidden_size", NULL, NULL, 1},
    {BERT "attention.output.LayerNorm.weight", "hidden_size", NULL, NULL, 1},
    {BERT "attention.output.LayerNorm.bias", "hidden_size", NULL, NULL, 1},
    {BERT "output.LayerNorm.weight", "hidden_size", NULL, NULL, 1},
    {BERT "output.LayerNorm.bias", "hidden_size", NULL, NULL, 1},
    {EMBEDDINGS "LayerNorm.gamma", "hidden_size", NULL, NULL, 2},
    {EMBEDDINGS "LayerNorm.beta", "hidden_size", NULL, NULL, 2},
    {BERT "attention.output.LayerNorm.gamma", "hidden_size", NULL, NULL, 2},
    {BERT "attention.output.LayerNorm.beta", "hidden_size", NULL, NULL, 2},
    {BERT "output.LayerNorm.gamma", "hidden_size", NULL, NULL, 2},
    {BERT "output.LayerNorm.beta", "hidden_size", NULL, NULL, 2},
    {"cls.predictions.transform.LayerNorm.weight", "hidden_size", "$lm", NULL, 1},
    {"cls.predictions.transform.LayerNorm.bias", "hidden_size", "$lm", NULL, 1},
    {"cls.predictions.transform.LayerNorm.gamma", "hidden_size", "$lm", NULL, 2},
    {"cls.predictions.transform.LayerNorm.beta", "hidden_size", "$lm", NULL, 2},
    {0}};

#define BERT_CROSS BERT "crossattention."
static const fsdp_tensor_row bert_cross_rows[] = {
    {BERT_CROSS "self.query.weight", "hidden_size, hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "self.query.bias", "hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "self.key.weight", "hidden_size, hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "self.key.bias", "hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "self.value.weight", "hidden_size, hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "self.value.bias", "hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "output.dense.weight", "hidden_size, hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "output.dense.bias", "hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "output.LayerNorm.weight", "hidden_size", "add_cross_attention", NULL, 0},
    {BERT_CROSS "output.LayerNorm.bias", "hidden_size", "add_cross_attention", NULL, 0},
    {0}};

#define BERT_NEXT "'ForNextSentencePrediction' || 'ForPreTraining'"
#define BERT_CLASSES "'ForSequenceClassification' || 'ForTokenClassification'"
static const fsdp_tensor_row bert_heads[] = {
    {"{base}pooler.dense.weight", "hidden_size, hidden_size", NULL, "$unpooled", 0},
    {"{base}pooler.dense.bias", "hidden_size", NULL, "$unpooled", 0},
    {"cls.predictions.bias", "vocab_size", "$lm", NULL, 0},
    {"cls.predictions.transform.dense.weight", "hidden_size, hidden_size", "$lm", NULL, 0},
    {"cls.predictions.transform.dense.bias", "hidden_size", "$lm", NULL, 0},
    {"cls.predictions.decoder.weight", "vocab_size, hidden_size", "$lm", TIED, 0},
    {"cls.predictions.decoder.bias", "vocab_size", "$lm", "1", 0},
    {"cls.seq_relationship.weight", "2, hidden_size", "$lm || " BERT_NEXT, "!(" BERT_NEXT ")", 0},
    {"cls.seq_relationship.bias", "2", "$lm || " BERT_NEXT, "!(" BERT_NEXT ")", 0},
    {"classifier.weight", "$labels, hidden_size", BERT_CLASSES, NULL, 0},
    {"classifier.bias", "$labels", BERT_CLASSES, NULL, 0},
    {"classifier.weight", "1, hidden_size", "'ForMultipleChoice'", NULL, 0},
    {"classifier.bias", "1", "'ForMultipleChoice'", NULL, 0},
    {"qa_outputs.weight", "$labels, hidden_size", "'ForQuestionAnswering'", NULL, 0},
    {"qa_outputs.bias", "$labels", "'ForQuestionAnswering'", NULL, 0},
    {0}};

/* --- the architectures -------------------------------------------------------------------------- */

#define CAUSAL causal_heads, task_heads, score_tokens
#define LLAMA_BASES "model.", "", "transformer."
static const fsdp_config_member none[] = {{0}};

static const fsdp_architecture architectures[] = {
    {"gpt2",
     {"transformer.", ""},
     1,
     gpt2_members,
     {gpt2_rows, gpt2_cross_rows, causal_heads, task_heads, classify_tokens}},
    {"llama", {LLAMA_BASES}, 1, none, {llama_rows, attention_rows, mlp_rows, CAUSAL}},
    {"mistral", {LLAMA_BASES}, 1, mistral_members, {llama_rows, attention_rows, mlp_rows, CAUSAL}},
    {"mixtral",
     {LLAMA_BASES},
     2,
     mixtral_members,
     {llama_rows, attention_rows, mixtral_rows, CAUSAL}},
    {"qwen2", {LLAMA_BASES}, 1, qwen2_members, {llama_rows, attention_rows, mlp_rows, CAUSAL}},
    {"qwen2_moe",
     {LLAMA_BASES},
     2,
     qwen2_moe_members,
     {llama_rows, attention_rows, mlp_rows, qwen_expert_rows, CAUSAL}},
    {"qwen3",
     {LLAMA_BASES},
     1,
     qwen3_members,
     {llama_rows, attention_rows, head_norm_rows, mlp_rows, CAUSAL}},
    {"qwen3_moe",
     {LLAMA_BASES},
     2,
     qwen3_moe_members,
     {llama_rows, attention_rows, head_norm_rows, mlp_rows, qwen_expert_rows, CAUSAL}},
    {"gemma", {LLAMA_BASES}, 1, gemma_members, {llama_rows, attention_rows, mlp_rows, CAUSAL}},
    {"gemma2",
     {LLAMA_BASES},
     1,
     gemma2_members,
     {llama_rows, attention_rows, gemma2_rows, mlp_rows, CAUSAL}},
    {"phi3", {LLAMA_BASES}, 1, phi3_members, {llama_rows, phi3_rows, CAUSAL}},
    {"opt", {"model.", ""}, 1, opt_members, {opt_rows, causal_heads, task_heads}},
    {"gpt_neox",
     {"gpt_neox.", ""},
     2,
     gpt_neox_members,
     {gpt_neox_rows, task_heads, classify_tokens}},
    {"bert",
     {"bert.", ""},
     2,
     bert_members,
     {bert_rows, bert_norm_rows, bert_cross_rows, bert_heads}},
};

const fsdp_architecture *fsdp_architecture_find(const char *model_type, size_t size)
{
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (strlen(architectures[i].model_type) == size &&
            memcmp(architectures[i].model_type, model_type, size) == 0)
            return &architectures[i];
    return NULL;
}

static const fsdp_config_member *find_in(const fsdp_config_member *list, const char *name,
                                         size_t size)
{
    for (; list->name; list++)
        if (strlen(list->name) == size && memcmp(list->name, name, size) == 0)
            return list;
    return NULL;
}

const fsdp_config_member *fsdp_architecture_member(const fsdp_architecture *architecture,
                                                   const char *name, size_t size)
{
    const fsdp_config_member *found = find_in(architecture->members, name, size);
    return found ? found : find_in(fsdp_config_common, name, size);
}
