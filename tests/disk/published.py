"""Writes models as others publish them in 4 or 8 bits, number by number as their formats are described."""

import json
import struct
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
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def block_of(w: list[float], form: str) -> tuple[bytes, list[float]]:
    """The bytes of one block, and the numbers that they stand for."""
    if form == "Q8_0":
        (d,) = struct.unpack("<e", half(max(map(abs, w)) / 127))
        q = [max(-127, min(127, round(x / d))) if d else 0 for x in w]
        return half(d) + struct.pack("<32b", *q), [d * i for i in q]
    if form == "Q4_0":
        (d,) = struct.unpack("<e", half(max(w, key=abs) / -8))
        q = [max(0, min(15, round(x / d) + 8)) if d else 8 for x in w]
        return half(d) + bytes(q[j] | q[j + 16] << 4 for j in range(16)), [d * (i - 8) for i in q]
    if form == "Q4_1":
        (m,), (d,) = struct.unpack("<e", half(min(w))), struct.unpack("<e", half((max(w) - min(w)) / 15))
        q = [max(0, min(15, round((x - m) / d))) for x in w]
        return half(d) + half(m) + bytes(q[j] | q[j + 16] << 4 for j in range(16)), [d * i + m for i in q]
    if form in ("Q5_0", "Q5_1"):
        (m,) = struct.unpack("<e", half(min(w))) if form == "Q5_1" else (0.0,)
        (d,) = struct.unpack("<e", half((max(w) - m) / 31 if m else max(w, key=abs) / -16))
        q = [max(0, min(31, round((x - m) / d) + (0 if m else 16))) for x in w]
        raw = (
            half(d) + (half(m) if form == "Q5_1" else b"") + struct.pack("<I", sum((q[i] >> 4) << i for i in range(32)))
        )
        return raw + bytes(q[j] & 15 | (q[j + 16] & 15) << 4 for j in range(16)), [
            d * (i if form == "Q5_1" else i - 16) + m for i in q
        ]
    if form in ("Q4_K", "Q5_K"):
        return _block_of_runs(w, 4 if form == "Q4_K" else 5)
    assert form == "Q6_K", form
    (d,) = struct.unpack("<e", half(max(map(abs, w)) / 31 / 49))
    scales = [64 - i for i in range(16)]
    q = [max(0, min(63, round(x / (d * scales[i // 16])) + 32)) for i, x in enumerate(w)]
    low, high = bytearray(128), bytearray(64)
    for i, code in enumerate(q):  # 128 at a time; four runs of 32 share bytes
        part, run, at = i // 128, i % 128 // 32, i % 32
        low[64 * part + 32 * (run % 2) + at] |= (code & 15) << (4 * (run // 2))
        high[32 * part + at] |= (code >> 4) << (2 * run)
    raw = bytes(low) + bytes(high) + struct.pack("<16b", *scales) + half(d)
    return raw, [d * scales[i // 16] * (code - 32) for i, code in enumerate(q)]


def _block_of_runs(w: list[float], bits: int) -> tuple[bytes, list[float]]:
    """256 weights in eight runs, each with a scale and a minimum of 6 bits."""
    runs, most = [w[i : i + 32] for i in range(0, 256, 32)], 2**bits - 1
    lows = [max(0.0, -min(run)) for run in runs]
    steps = [(max(run) + low) / most for run, low in zip(runs, lows, strict=True)]
    (d,), (e,) = (struct.unpack("<e", half(max(x) / 63)) for x in (steps, lows))
    s, m = [round(x / d) for x in steps], [round(x / e) for x in lows]
    q = [max(0, min(most, round((x + e * m[i // 32]) / (d * s[i // 32])))) for i, x in enumerate(w)]
    head = bytes(s[i] | (s[i + 4] >> 4) << 6 for i in range(4)) + bytes(m[i] | (m[i + 4] >> 4) << 6 for i in range(4))
    head += bytes(s[i + 4] & 15 | (m[i + 4] & 15) << 4 for i in range(4))
    fifth = bytes(sum((q[32 * run + at] >> 4) << run for run in range(8)) for at in range(32)) if bits == 5 else b""
    pairs = [(64 * i + at, 64 * i + 32 + at) for i in range(4) for at in range(32)]
    codes = bytes(q[a] & 15 | (q[b] & 15) << 4 for a, b in pairs)
    numbers = [d * s[i // 32] * code - e * m[i // 32] for i, code in enumerate(q)]
    return half(d) + half(e) + head + fifth + codes, numbers


def packed(w: torch.Tensor, form: str) -> tuple[bytes, torch.Tensor]:
    """All blocks of a tensor, and its numbers."""
    if form in ("F32", "F16"):
        kept = w.float() if form == "F32" else w.half()
        return kept.numpy().tobytes(), kept.float()
    size = 256 if form.endswith("_K") else 32
    found = [block_of(row, form) for row in w.float().reshape(-1, size).tolist()]
    return b"".join(raw for raw, _ in found), torch.tensor([x for _, xs in found for x in xs]).view(w.shape)


def text(word: str) -> bytes:
    return struct.pack("<Q", len(word)) + word.encode()


def write_gguf(
    source: Path, target: Path, form: str = "Q4_0", head: str = "F16", parts: int = 1
) -> dict[str, torch.Tensor]:
    """A Llama directory as one GGUF file with its config beside it, or in parts of which only the first has metadata of
    the model, and no tensors; returns the numbers that it holds, by name."""
    pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, numbers, tensors = model.config, {}, []
    for name, param in model.named_parameters():
        stem, _, kind = name.rpartition(".")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        gguf_name = f"blk.{layer}.{INSIDE[stem.split('.', 3)[3]]}" if layer is not None else TOP[stem]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(gguf_name[6:], 0)
        w = param.data
        if heads:  # as llama.cpp turns them
            w = w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)
        form_now = "F32" if w.dim() == 1 else form if layer is not None else head
        raw, held = packed(w, form_now)
        if heads:
            held = held.view(heads, w.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(w.shape)
        numbers[name] = held
        sides = struct.pack(f"<I{w.dim()}Q", w.dim(), *reversed(w.shape))
        tensors.append((text(f"{gguf_name}.{kind}") + sides + struct.pack("<I", TYPES[form_now]), raw))
    about = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    whole = {"attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads}
    whole |= {"embedding_length": config.hidden_size, "block_count": config.num_hidden_layers}
    whole |= {"feed_forward_length": config.intermediate_size}
    real = {"rope.freq_base": config.rope_parameters["rope_theta"]}
    real |= {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}
    about += b"".join(text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in whole.items())
    about += b"".join(text(f"llama.{key}") + struct.pack("<If", 6, value) for key, value in real.items())
    about += text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    target.mkdir()
    if parts == 1:
        write_part(target / "model.gguf", 2 + len(whole) + len(real), about, tensors)
    for i in range(parts if parts > 1 else 0):
        split = text("split.no") + struct.pack("<IH", 2, i) + text("split.count") + struct.pack("<IH", 2, parts)
        split += text("split.tensors.count") + struct.pack("<Ii", 5, len(tensors))
        pairs, said = (5 + len(whole) + len(real), about + split) if i == 0 else (3, split)
        write_part(
            target / f"model-{i + 1:05}-of-{parts:05}.gguf", pairs, said, tensors[i - 1 :: parts - 1] if i else []
        )
    config.save_pretrained(target)
    return numbers


def write_part(path: Path, pairs: int, about: bytes, tensors: list[tuple[bytes, bytes]]) -> None:
    """One GGUF file. tensors: what is listed of each up to its type, and its bytes."""
    listed = data = b""
    for head, raw in tensors:
        listed += head + struct.pack("<Q", len(data))
        data += raw + b"\0" * (-len(raw) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), pairs) + about + listed
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)


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
