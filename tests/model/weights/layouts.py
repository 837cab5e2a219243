"""Model directories in the layouts of the day: configs and tokenizers as they were published under Transformers 4.44,
4.51 and 5, with small random weights. Those of 5 are written by Transformers 5 itself."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = [f"{a} plus {b} is {a + b}, and the theory of the thing is that." for a in range(9) for b in range(9)]
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
PLAIN = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}
PLAIN |= {"use_cache": True, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072, "rope_theta": 1000000.0}
QWEN = PLAIN | {"max_window_layers": 2, "sliding_window": None, "use_sliding_window": False, "rms_norm_eps": 1e-06}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONG = {"long_factor": [1.0 + i / 2 for i in range(8)], "short_factor": [1.0 + i / 8 for i in range(8)]}
PHI_CODE = {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}
BOS, EOS, PAD, TURN, UNK = "<s>", "</s>", "<pad>", "<|turn|>", "<unk>"
IDS = {BOS: 0, EOS: 1, PAD: 2, TURN: 3, UNK: 4}

# name: (version, class of the model, its settings, class of the tokenizer, what stands in tokenizer_config.json)
OLD: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("4.44.0", "LlamaForCausalLM", SIZES | PLAIN | {
        "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "eos_token_id": [1, 3], "rope_theta": 500000.0,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
    }, "PreTrainedTokenizerFast", {"clean_up_tokenization_spaces": True, "model_input_names": ["input_ids"]}),
    "qwen2": ("4.43.1", "Qwen2ForCausalLM", SIZES | QWEN, "Qwen2Tokenizer", {
        "add_prefix_space": False, "errors": "replace", "split_special_tokens": False, "unk_token": None,
    }),
    "mistral": ("4.44.0", "MistralForCausalLM", SIZES | PLAIN | {"head_dim": 16, "sliding_window": None},
        "LlamaTokenizer", {"add_bos_token": True, "add_eos_token": False, "legacy": False, "sp_model_kwargs": {}}),
    "opt": ("4.44.0", "OPTForCausalLM", {
        "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "word_embed_proj_dim": 64,
        "_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu", "dropout": 0.1,
        "attention_dropout": 0.0, "do_layer_norm_before": True, "init_std": 0.02, "layerdrop": 0.0, "use_cache": True,
        "max_position_embeddings": 128, "prefix": "</s>", "bos_token_id": 1,
    }, "GPT2Tokenizer", {"add_bos_token": True, "errors": "replace", "special_tokens_map_file": None}),
    "phi3": ("4.43.3", "Phi3ForCausalLM", SIZES | PLAIN | {
        "auto_map": PHI_CODE, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 32,
        "rope_scaling": LONG | {"type": "longrope"}, "rope_theta": 10000.0, "sliding_window": 262144,
    }, "LlamaTokenizer", {"add_bos_token": False, "legacy": False, "sp_model_kwargs": {}}),
    "gemma3_text": ("4.51.3", "Gemma3ForCausalLM", SIZES | PLAIN | {
        "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid", "head_dim": 16,
        "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 10000, "rope_scaling": None, "sliding_window": 8, "sliding_window_pattern": 2,
        "eos_token_id": [1, 3], "tie_word_embeddings": True,
    }, "GemmaTokenizer", {"boi_token": TURN, "extra_special_tokens": {"boi_token": TURN}, "sp_model_kwargs": None}),
    "qwen3": ("4.51.0", "Qwen3ForCausalLM", SIZES | QWEN | {
        "head_dim": 16, "attention_bias": False, "rope_scaling": None,
    }, "Qwen2Tokenizer", {"add_prefix_space": False, "errors": "replace", "additional_special_tokens": [TURN]}),
}  # fmt: skip


def write_layout(name: str, path: Path) -> Path:
    """The directory of a model: an older layout ("llama"), or that of Transformers 5 ("llama at 5")."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name, _, is_new = name.partition(" at ")
    path.mkdir()
    write_texts(name, path)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    for param in module.parameters():
        torch.nn.init.normal_(param, std=0.2)
    module.to(torch.bfloat16)
    module.save_pretrained(new := path.with_suffix(".new"))
    if not is_new:
        (new / "model.safetensors").rename(path / "model.safetensors")
        return path
    AutoTokenizer.from_pretrained(path).save_pretrained(new)
    return new


def write_texts(name: str, path: Path) -> None:
    version, architecture, settings, kind, about = OLD[name]
    is_pieces, alphabet = kind in ("LlamaTokenizer", "GemmaTokenizer"), pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(unk_token=UNK if is_pieces else None, fuse_unk=is_pieces))
    if is_pieces:
        steps = [normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if kind[0] == "L" else steps)
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
        (path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(IDS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in IDS])
    config = {"architectures": [architecture], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2} | settings
    config |= {"model_type": name, "vocab_size": tokenizer.get_vocab_size(), "torch_dtype": "bfloat16"}
    ends = {
        "bos_token_id": 0,
        "do_sample": True,
        "eos_token_id": [1, 3],
        "pad_token_id": 2,
        "temperature": 0.6,
        "top_p": 0.9,
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    named = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    said = {"added_tokens_decoder": {str(i): {"content": text} | flags | {"special": True} for text, i in IDS.items()}}
    said |= about | named | {"chat_template": CHAT, "model_max_length": 131072, "tokenizer_class": kind}
    texts: dict[str, Any] = {"config.json": config | {"transformers_version": version}, "tokenizer_config.json": said}
    texts["special_tokens_map.json"] = {key: {"content": text} | flags for key, text in named.items()}
    if name != "opt":  # from before generation_config.json and tokenizer.json
        texts["generation_config.json"] = ends | {"transformers_version": version}
        tokenizer.save(str(path / "tokenizer.json"))
    if not is_pieces and kind != "PreTrainedTokenizerFast":
        tokenizer.model.save(str(path))
    for file, content in texts.items():
        (path / file).write_text(json.dumps(content, indent=2, sort_keys=file == "config.json") + "\n")
    for code in {value.partition(".")[0] for value in settings.get("auto_map", {}).values()}:
        (path / f"{code}.py").write_text("raise SystemExit('code of a model was run')\n")
