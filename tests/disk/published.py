"""Writes models as others publish them in 4 or 8 bits, number by number as their formats are described."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INSIDE = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(
    source: Path, target: Path, form: str = "Q4_0", head: str = "F16", parts: int = 1
) -> dict[str, torch.Tensor]:
    """A Llama directory as one GGUF file with its config beside it, or in parts of which only the first has metadata of
    the model, and no tensors, as llama.cpp writes them; returns the numbers that it holds, by name."""
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, numbers, named = model.config, {}, list(model.named_parameters())
    target.mkdir()
    each = -(-len(named) // (parts - 1)) if parts > 1 else 0
    writer = gguf.GGUFWriter(
        target / "model.gguf", "llama", use_temp_file=False, split_max_tensors=each, small_first_shard=parts > 1
    )
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_array("tokens", ["a", "b"])
    for name, param in named:
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        gguf_name = f"blk.{layer}.{INSIDE[stem.split('.', 3)[3]]}" if layer is not None else TOP[stem]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(gguf_name[6:], 0)
        w = param.data
        if heads:  # as llama.cpp turns them
            w = w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)
        now = gguf.GGMLQuantizationType["F32" if w.dim() == 1 else form if layer is not None else head]
        raw = gguf.quants.quantize(w.contiguous().numpy(), now)
        held = torch.from_numpy(gguf.quants.dequantize(raw, now).copy()).view(w.shape)
        if heads:
            held = held.view(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)
        numbers[name] = held
        writer.add_tensor(f"{gguf_name}.{kind}", raw, raw_dtype=now)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config.save_pretrained(target)
    return numbers


def _write(source: Path, target: Path, layer: Any, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A directory in which layer(name, w) -> (tensors, numbers) has replaced the matrices of blocks."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    numbers, tensors = {}, {}
    for name, param in model.named_parameters():
        if param.dim() == 2 and ".layers." in name:
            made, numbers[name] = layer(name, param.data)
            tensors |= made
        else:
            numbers[name], tensors[name] = param.data, param.data.clone()
    model.config.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return numbers


def write_bnb(source: Path, target: Path, nested: bool = True) -> dict[str, torch.Tensor]:
    """bitsandbytes' nf4, with scales that are quantised themselves or not."""
    from keyhole.ops.lowbit import NF4

    levels = torch.tensor(NF4)

    def layer(name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        blocks = w.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        about: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
        made = {f"{name}.quant_map": levels.clone()}
        if nested:
            inner_map, offset = torch.linspace(-1, 1, 256), float(absmax.mean())
            outer = torch.stack([part.abs().max() for part in (absmax - offset).split(256)])
            scaled = (absmax - offset) / outer.repeat_interleave(256)[: len(absmax)]
            codes = (scaled.unsqueeze(1) - inner_map).abs().argmin(1).to(torch.uint8)
            absmax = inner_map[codes.long()] * outer.repeat_interleave(256)[: len(absmax)] + offset
            about |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            made |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": inner_map, f"{name}.absmax": codes}
        else:
            made[f"{name}.absmax"] = absmax.clone()
        q = ((blocks / absmax.unsqueeze(1)).unsqueeze(2) - levels).abs().argmin(2)
        flat = q.view(-1).to(torch.uint8)
        made[name] = (flat[0::2] << 4 | flat[1::2]).unsqueeze(1).contiguous()
        state = json.dumps(about).encode()
        made[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
        return made, (levels[q] * absmax.unsqueeze(1)).view(w.shape)

    return _write(source, target, layer, {"quant_method": "bitsandbytes", "load_in_4bit": True})


def _pack_rows(q: torch.Tensor) -> torch.Tensor:
    """Eight codes of 4 bits down a column in one int32."""
    rows = q.view(-1, 8, q.shape[1]).long() << torch.arange(0, 32, 4).view(1, 8, 1)
    total = rows.sum(1)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def write_ints(
    source: Path, target: Path, method: str, sym: bool, group: int = 32, reorder: bool = False
) -> dict[str, torch.Tensor]:
    """GPTQ or AWQ in 4 bits; sym: all zero points are 8. reorder: inputs belong to groups in another order (GPTQ)."""

    def layer(name: str, w: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        generator = torch.Generator().manual_seed(len(name))
        order = torch.randperm(w.shape[1], generator=generator) if reorder else torch.arange(w.shape[1])
        back = torch.argsort(order)
        stem, w_GgO = name.removesuffix(".weight"), w[:, order].t().reshape(-1, group, w.shape[0])
        scale_GO = (w_GgO.abs().amax(1) / 7).half()
        zero_GO = torch.full(scale_GO.shape, 8) if sym else torch.randint(0, 16, scale_GO.shape, generator=generator)
        q = (torch.round(w_GgO / scale_GO.float().unsqueeze(1)) + zero_GO.unsqueeze(1)).clamp(0, 15)
        held = (scale_GO.float().unsqueeze(1) * (q - zero_GO.unsqueeze(1))).reshape(-1, w.shape[0])[back].t()
        held, q_IO = held.contiguous(), q.reshape(-1, w.shape[0]).int()[back]
        made = {f"{stem}.scales": scale_GO}
        if method == "gptq":
            made[f"{stem}.qweight"] = _pack_rows(q_IO)
            made[f"{stem}.qzeros"] = _pack_rows(((zero_GO - 1) % 16).int().t().contiguous()).t().contiguous()
            made[f"{stem}.g_idx"] = (back // group).int()
        else:
            order = [8 * i + j for i in range(w.shape[0] // 8) for j in (0, 2, 4, 6, 1, 3, 5, 7)]
            made[f"{stem}.qweight"] = _pack_rows(q_IO[:, order].t().contiguous()).t().contiguous()
            made[f"{stem}.qzeros"] = _pack_rows(zero_GO.int()[:, order].t().contiguous()).t().contiguous()
        return made, held

    said = {"quant_method": method, "bits": 4, "group_size": group, "sym": sym, "desc_act": reorder}
    return _write(source, target, layer, said)
