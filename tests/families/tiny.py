"""A tiny config for every causal language model that the installed Transformers knows.

A config class of Transformers has defaults for all of its settings, those of a published model. `tiny_config` replaces
the ones that give a model its size (SMALL), wherever a class has a setting of that name, also in configs inside it;
SPECIAL says what a single type needs beyond that. Encoders are built as decoders, and dropout and router noise are off.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB, WIDTH, LAYERS, HEADS = 99, 32, 4, 4

SMALL: dict[str, Any] = (
    dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "pronunciation_vocab_size", "shape_vocab_size"), VOCAB)
    | dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "emb_dim", "embedding_size"), WIDTH)
    | dict.fromkeys(("lru_width", "input_embedding_size", "output_embedding_size", "pronunciation_embed_dim"), WIDTH)
    | dict.fromkeys(("shape_embed_dim", "out_hidden_size", "vision_output_dim", "output_proj_dims"), WIDTH)
    | dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth"), LAYERS)
    | dict.fromkeys(("num_decoder_layers", "encoder_layers", "num_encoder_layers", "max_window_layers"), LAYERS)
    | dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS)
    | dict.fromkeys(("encoder_attention_heads", "attention_heads", "swa_num_attention_heads", "index_n_heads"), HEADS)
    | dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads", "linear_num_heads"), HEADS)
    | dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), 2)
    | dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 64)
    | dict.fromkeys(("ffn_hidden_size", "dim_ff", "intermediate_size_mlp", "dense_intermediate_size"), 64)
    | dict.fromkeys(("mlp_dim", "feed_forward_size", "d_inner"), 64)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32)
    | dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32)
    | dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "swa_head_dim", "dim_head"), 8)
    | dict.fromkeys(("index_head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8)
    | dict.fromkeys(("kv_channels", "attention_head_size", "global_head_dim", "hidden_size_per_layer_input"), 8)
    | dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "adapter_rank", "router_hidden_size"), 16)
    | dict.fromkeys(("hc_lowrank", "laurel_rank", "gated_norm_rank"), 8)
    | dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "zero_expert_num"), 4)
    | dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"), 2)
    | dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups", "mamba_ngroups", "o_groups"), 1)
    | dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1)
    | dict.fromkeys(("num_dense_layers", "moe_layer_start_index", "num_kv_shared_layers"), 1)
    | dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_d_conv"), 4)
    | dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8)
    | dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8)
    | dict.fromkeys(("mamba_d_ssm",), 64)
    | dict.fromkeys(("chunk_size", "mamba_chunk_size", "block_size"), 8)
    | dict.fromkeys(("linear_num_value_heads",), 4)
    | dict.fromkeys(("linear_num_key_heads",), 2)
    | dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 64)
    | dict.fromkeys(("max_source_positions", "max_target_positions", "seq_length", "rel_extent"), 64)
    | dict.fromkeys(("sliding_window", "attention_window_size", "local_attention", "window_size"), 8)
    | dict.fromkeys(("sliding_window_size", "attention_window", "attention_chunk_size", "index_topk"), 8)
    | dict.fromkeys(("query_pre_attn_scalar",), 8)
    | dict.fromkeys(("rotary_dim",), 4)
    | dict.fromkeys(("image_size",), 32)
    | dict.fromkeys(("patch_size",), 16)
    | dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), 0)
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
)
DROPOUT = ("dropout", "_pdrop", "layerdrop", "dropout_prob", "_dropout_rate", "jitter_noise")

_PER_LAYER = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False}
_PER_LAYER |= {"num_kv_shared_layers": LAYERS}
_QWEN4 = {"ple_layer_ids": [2], "ple_embed_dim": 32, "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
_QWEN4 |= {"split_ngram_parts": 2, "hc_count": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
_QWEN4 |= {"indexer_budget": 8, "indexer_compress_ratio": 2}
_SHARED_KV = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {
        "encoder_hash_byte_group_vocab": VOCAB,
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots3_note": {
        "vision_config": {"per_layer_config": {}, "adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"text_config": _SHARED_KV},
    "gemma4_text": _SHARED_KV,
    "gemma4_unified": {"text_config": _SHARED_KV, "vision_config": {"mm_posemb_size": 16, "mm_embed_dim": WIDTH}},
    "gemma4_unified_text": _SHARED_KV,
    "gemma3n_text": _SHARED_KV,
    "gemma4_assistant": {"text_config": _PER_LAYER, "backbone_hidden_size": WIDTH, "num_centroids": 9},
    "gemma4_unified_assistant": {"text_config": _PER_LAYER, "backbone_hidden_size": WIDTH, "num_centroids": 9},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "musicgen": {"is_encoder_decoder": True},
    "musicgen_melody": {"is_encoder_decoder": True},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (8, 8), "attn_layers": ("local", "lsh") * 2},
    "rwkv": {"rescale_every": 0},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A config of a few thousand parameters; changes are settings of the outermost config."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_merged(_merged(_small(cls), SPECIAL.get(model_type, {})), changes))


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes of a config inside are changes of some of its settings."""
    return settings | {
        name: settings[name] | new if isinstance(settings.get(name), dict) and isinstance(new, dict) else new
        for name, new in changes.items()
    }


def _small(cls: type) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, default in ((field.name, field.default) for field in fields(cls)):
        if name in SMALL:
            settings[name] = SMALL[name]
        elif isinstance(default, int | float) and not isinstance(default, bool) and name.endswith(DROPOUT):
            settings[name] = 0.0
        elif name == "is_decoder":
            settings[name] = True
        elif name == "is_encoder_decoder":
            settings[name] = False
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:  # latent attention has no shared heads
        settings["num_key_value_heads"] = HEADS
    for name, inside in getattr(cls, "sub_configs_defaults", {}).items():
        if inside.model_type is not None:  # of any type; this one unless another is named
            settings[name] = {"model_type": inside.model_type} | _small(CONFIG_MAPPING[inside.model_type])
        elif is_dataclass(inside.config_class):
            settings[name] = _small(inside.config_class)
    return settings
