"""Small models of many families, whose names in memory are not those that transformers saves.

hub_names.py TABLE and hub_converts.py use them: {name: a function that makes the model}.
"""

import transformers as t

TEXT = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MOE = TEXT | dict(moe_intermediate_size=8, num_experts_per_tok=2)
VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=8,
              patch_size=4)
IMAGE = VISION | dict(num_channels=3)


def llama(**more):
    return t.LlamaConfig(**TEXT, **more)


def clip():
    return t.CLIPVisionConfig(**VISION, projection_dim=16)


def siglip():
    return t.SiglipVisionConfig(**VISION)


CASES = {
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4)),
    "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**TEXT, num_local_experts=11)),
    "minimax": lambda: t.MiniMaxForCausalLM(t.MiniMaxConfig(**TEXT, num_local_experts=3)),
    "qwen2_moe": lambda: t.Qwen2MoeForCausalLM(t.Qwen2MoeConfig(
        **MOE, num_experts=11, shared_expert_intermediate_size=8)),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**MOE, num_experts=11)),
    "olmoe": lambda: t.OlmoeForCausalLM(t.OlmoeConfig(**TEXT, num_experts=4, num_experts_per_tok=2)),
    "deepseek_v2": lambda: t.DeepseekV2ForCausalLM(t.DeepseekV2Config(
        **MOE, n_routed_experts=4, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8)),
    "deepseek_v3": lambda: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(
        **MOE, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)),
    "ernie4_5_moe": lambda: t.Ernie4_5_MoeForCausalLM(t.Ernie4_5_MoeConfig(
        **TEXT, moe_intermediate_size=8, moe_num_experts=4, moe_k=2, moe_layer_start_index=1)),
    "glm4_moe": lambda: t.Glm4MoeForCausalLM(t.Glm4MoeConfig(
        **MOE, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1)),
    "flex_olmo": lambda: t.FlexOlmoForCausalLM(t.FlexOlmoConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2)),
    "granitemoe": lambda: t.GraniteMoeForCausalLM(t.GraniteMoeConfig(
        **TEXT, num_local_experts=4, num_experts_per_tok=2)),
    "phimoe": lambda: t.PhimoeForCausalLM(t.PhimoeConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2)),
    "jamba": lambda: t.JambaForCausalLM(t.JambaConfig(
        **TEXT, num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_dt_rank=4, use_mamba_kernels=False)),
    "llava": lambda: t.LlavaForConditionalGeneration(t.LlavaConfig(
        vision_config=clip(), text_config=llama())),
    "llava_next": lambda: t.LlavaNextForConditionalGeneration(t.LlavaNextConfig(
        vision_config=clip(), text_config=llama())),
    "llava_mistral": lambda: t.LlavaForConditionalGeneration(t.LlavaConfig(
        vision_config=clip(), text_config=t.Qwen3Config(**TEXT))),
    "vipllava": lambda: t.VipLlavaForConditionalGeneration(t.VipLlavaConfig(
        vision_config=clip(), text_config=llama())),
    "paligemma": lambda: t.PaliGemmaForConditionalGeneration(t.PaliGemmaConfig(
        vision_config=siglip(), text_config=t.GemmaConfig(**TEXT), projection_dim=16,
        vocab_size=64, image_token_index=63)),
    "mistral3": lambda: t.Mistral3ForConditionalGeneration(t.Mistral3Config(
        vision_config=t.PixtralVisionConfig(**VISION), text_config=t.MistralConfig(**TEXT))),
    "gemma3": lambda: t.Gemma3ForConditionalGeneration(t.Gemma3Config(
        text_config=t.Gemma3TextConfig(**TEXT), vision_config=siglip(), mm_tokens_per_image=4)),
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**IMAGE)),
    "vit_base": lambda: t.ViTModel(t.ViTConfig(**IMAGE)),
    "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
                                                   image_size=8, patch_size=4)),
    "deit": lambda: t.DeiTForImageClassification(t.DeiTConfig(**IMAGE)),
}
