"""Tiny random Hugging Face decoders, one of each family: what "any HF decoder" is tested on.

    config("llama")                  a fresh config, ready for keyhole.load(config, init="random", device="cpu")
    load("llama", placement="stream") the model of that, with options of keyhole.load
    batch(rows=2, length=10)         random tokens; the first PROMPT tokens of a row are not trained on
    hf_nll(module, batch)            the same number by the book: F.cross_entropy on the full logits

They differ in what could go wrong: tied and untied heads, learned, rotary and ALiBi positions, biases,
parallel blocks, soft caps and scaled logits or embeddings, one matrix for q, k and v, experts as one 3-D
tensor, buffers that belong to the checkpoint, layers of two kinds, state-space layers that use a weight without
entering the module that owns it.

They have two blocks: with table and head four units that stream, more than there are slots. On a GPU, where small
tables stay, they have three.
"""

from typing import Any

import torch
import transformers as hf
from torch.nn import functional as F

import keyhole

VOCAB, WIDTH, PROMPT = 99, 32, 3
LAYERS = 3 if torch.cuda.is_available() else 2
_SIZE = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": VOCAB}
_MLP = _SIZE | {"intermediate_size": 64}
_GQA = _MLP | {"num_key_value_heads": 2}
_HEAD = _GQA | {"head_dim": 8}
_GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 64}
_GPT |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # tests/methods/test_dropout.py has dropout
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OPT = {"ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_LINEAR_ATTENTION = {
    "num_hidden_layers": 4,  # three of linear attention, one of full
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", _SIZE | _OPT | {"word_embed_proj_dim": WIDTH}),
    "opt_projected": ("OPTConfig", _SIZE | _OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "bloom": ("BloomConfig", {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB}),
    "gpt2": ("GPT2Config", _GPT),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 4}),
    "gpt_neox": ("GPTNeoXConfig", _MLP | {"max_position_embeddings": 64}),
    "llama": ("LlamaConfig", _MLP),
    "mistral": ("MistralConfig", _GQA),
    "qwen2": ("Qwen2Config", _GQA | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", _HEAD),
    "gemma2": ("Gemma2Config", _HEAD),
    "gemma3": ("Gemma3TextConfig", _HEAD),
    "phi": ("PhiConfig", _MLP),
    "phi3": ("Phi3Config", _GQA | {"pad_token_id": 0}),
    "falcon": ("FalconConfig", _SIZE | {"alibi": False}),
    "falcon_alibi": ("FalconConfig", _SIZE | {"alibi": True, "new_decoder_architecture": False}),
    "cohere": ("CohereConfig", _GQA),
    "granite": ("GraniteConfig", _GQA | {"logits_scaling": 8.0}),
    "stablelm": ("StableLmConfig", _GQA),
    "olmo2": ("Olmo2Config", _GQA),
    "mixtral": ("MixtralConfig", _GQA | {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", _GQA | _MOE | {"shared_expert_intermediate_size": 32}),
    "gpt_oss": ("GptOssConfig", _HEAD | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": ("Llama4TextConfig", _HEAD | {"num_local_experts": 2, "intermediate_size_mlp": 64}),
    "deepseek_v3": ("DeepseekV3Config", _MLP | _DEEPSEEK),
    "qwen3_next": ("Qwen3NextConfig", _HEAD | _MOE | _LINEAR_ATTENTION),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        _MLP | {"num_hidden_layers": 3, "lru_width": WIDTH, "num_key_value_heads": 1},
    ),
    "mamba": ("MambaConfig", {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "state_size": 4}),
}
NAMES = list(DECODERS)
TWELVE = "opt bloom gpt2 gpt_neox llama mistral qwen2 qwen3 gemma3 phi falcon mixtral".split()
UNLIKE = "falcon_alibi gpt_oss deepseek_v3 qwen3_next recurrent_gemma mamba".split()  # the twelve


def config(name: str, **changes: Any) -> Any:
    """A fresh config of this family, with special tokens inside the tiny vocabulary."""
    cls, settings = DECODERS[name]
    made = getattr(hf, cls)(**settings | changes)
    made.pad_token_id, made.bos_token_id, made.eos_token_id = 0, 1, 2
    return made


def load(name: str = "llama", **options: Any) -> keyhole.Model:
    return keyhole.load(config(name), **{"init": "random", "device": "cpu"} | options)


def batch(rows: int = 2, length: int = 10, seed: int = 0, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """Random tokens, none of them special; the first PROMPT tokens of each row are not trained on."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, vocab, (rows, length), generator=generator)
    labels = input_ids.clone()
    labels[:, :PROMPT] = -100
    return {"input_ids": input_ids, "labels": labels}


@torch.no_grad()
def hf_nll(module: torch.nn.Module, one: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B] summed NLL of each row, from the full logits of an ordinary HF model."""
    inputs = {name: x for name, x in one.items() if name != "labels"}
    logits_BTV = module(**inputs, use_cache=False).logits[:, :-1].float()
    nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), one["labels"][:, 1:], ignore_index=-100, reduction="none")
    return nll_BT.sum(dim=1)
