"""What weight files must be to be read into a model: names, shapes, numbers, formats; refused or reported, from headers
alone.

**Names** are those of the module, or the same without (or with) the prefix of its decoder, as GPT-2 and OPT are
published. A checkpoint whose names match in neither way goes through Transformers' own loader (read.py).

**A tied tensor** has one home and two names (`lm_head.weight`, `model.embed_tokens.weight`), and files may store either
or both. If both are there with different values, config.json is wrong about the tie: Transformers 5 loads two separate
tensors, others take the first. Whichever is taken, another model is trained than somebody else runs: refused. The
comparison reads both tensors, and only where both are stored.

**Tensors without a parameter** are named in the start block: a config with fewer layers than the files gives a smaller
model, a classifier leaves out the language model's head. Not named: second names of a tied tensor, buffers that the
module computes itself, and tensors that Transformers ignores too. A scale beside a weight (`q_proj.weight_scale`) means
that the weight is quantised in a format that is not supported, whatever config.json says: refused.

**A GGUF file** only gives its tensors, and the module is built by config.json: with another number of heads, rope base
or norm epsilon they fit as well, and the model computes something else. So whatever both of them say must agree.

**Models that were published in 4 or 8 bits** (disk/gguf.py, disk/quantized.py):

    wire = null (or 16 bits)    unpacked tensor by tensor while they are read, and rounded once to the dtype of compute
    wire = fp8                  unpacked, and rounded once to fp8; no frozen format, so they can be trained
    wire = int4 | int8 | nf4    copied bit for bit, if all matrices of the blocks are on such a grid; else refused,
                                because rounding them to another grid would add its error to the one that they have

Grids that are copied: GGUF's Q4_0 and Q4_1 as int4 and Q8_0 as int8, with a scale per 32; GPTQ and AWQ in 4 bits as
int4; bitsandbytes' nf4 with its float32 scales. Where the published grid has an offset per group, so has the copy.
Sizes must be multiples of 64.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from keyhole.disk.json_text import finite
from keyhole.disk.weight_files import Stored, gguf_settings, has_weights, stored_tensors
from keyhole.errors import UserError, listed
from keyhole.model.structure.config_files import setting
from keyhole.model.structure.layout import ALIGN, FlatTensor, Layout, find_layout
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.format import FROZEN, Wire, is_matrix
from keyhole.ops.lowbit import Grid

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

SHOWN = 3
READ = ("gptq", "awq", "bitsandbytes")  # quant_method in config.json
TABLES = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
NEAR = 1e-5  # relative; GGUF has float32
# Key of a GGUF, after its architecture -> key of config.json.
GGUF_KEYS = {
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """How the files of a directory fit a module. names: in the module -> in the files; None: Transformers must match
    them. may_lack: parameters that need not be there; lines: for the start block."""

    stored: Mapping[str, Stored]
    names: dict[str, str] | None
    may_lack: frozenset[str]
    lines: list[str] = field(default_factory=list)


def find_fit(module: "PreTrainedModel", layout: Layout, directory: Path, fresh_head: bool = False) -> Fit:
    """UserError if the files cannot be those of the module. fresh_head: tensors of a classifier's head, and the pooling
    layer, which some encoders are published without, may be missing, or be there for another number of labels."""
    stored, may_lack = stored_tensors(directory), frozenset[str]()
    check_gguf_config(module.config, directory)
    if fresh_head:
        prefix, own = f"{module.base_model_prefix}.", [name for name, _ in module.named_parameters()]
        may_lack = frozenset(n for n in own if not n.startswith(prefix) or f"{prefix}pooler." in n)
    names = match_names(module, layout, directory, may_lack)
    if names is None:
        return Fit(stored, None, may_lack)
    for tensor in (t for t in layout.tensors if t.name in names):
        found, expected = stored[names[tensor.name]], tuple(tensor.shape)
        if found.shape != expected:
            file = directory / found.file
            raise UserError(f"model: {file} holds {tensor.name} with shape {found.shape}; config.json says {expected}")
    whole = {name for name, buffer in saved_buffers(module).items() if not buffer.is_floating_point()}
    for in_file in (names[name] for name in names if name not in whole):
        if not (found := stored[in_file]).is_number:
            raise UserError(
                f"model: {directory / found.file} holds {in_file} as whole numbers ({found.dtype}): codes of quantised "
                "weights, in a format that is not read here; dequantize the model first, or fetch it in 16 bits"
            )
    for _, known in names_of(module, layout):
        first, *others = [name for name in dict.fromkeys(known) if name in stored] or [""]
        for other in others:
            one, two = (stored[name].read(directory, name) for name in (first, other))
            if one.shape != two.shape or not torch.equal(one, two):
                raise untied(directory, first, other)
    return Fit(stored, names, may_lack, unused_line(_find_unused(module, stored, names, directory)))


def check_weights(module: "PreTrainedModel", layout: Layout, directory: Path, fresh_head: bool = False) -> list[str]:
    """Checks what a load would find: raises UserError, or returns lines that describe it."""
    fit = find_fit(module, layout, directory, fresh_head)
    files = len({one.file for one in fit.stored.values()})
    count = f"{len(fit.stored)} tensors in {files} {'file' if files == 1 else 'files'}"
    if fit.names is None:
        return [f"weights: {count}, whose names Transformers will have to match; not checked further"]
    drawn = [t.name for t in layout.tensors if t.name not in fit.names]
    rest = f"complete but for {', '.join(drawn)}, drawn by the seed," if drawn else "complete"
    return [f"weights: {count}, {rest} and of the shapes that the config says", *fit.lines]


# -- names -------------------------------------------------------------------------------------------------------------


def names_of(module: "PreTrainedModel", layout: Layout) -> Iterator[tuple[str, list[str]]]:
    """Each parameter, and all names that files may have for it: with and without the prefix of the decoder."""
    aliases: dict[int, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(param), []).append(name)
    prefix = f"{module.base_model_prefix}."
    for tensor in layout.tensors:
        own = aliases[id(tensor.param)]
        yield tensor.name, [tensor.name, *own, *(n.removeprefix(prefix) for n in own), *(prefix + n for n in own)]


def match_names(
    module: "PreTrainedModel", layout: Layout, directory: Path, may_lack: frozenset[str] = frozenset()
) -> dict[str, str] | None:
    """Name in the module -> name in the files; None if a parameter has no match, and Transformers must load the model:
    UserError if the weights are quantised, which it would need the packages of their format for, and would not unpack.
    may_lack: parameters that are left out if they have no match, or if theirs is for another number of labels."""
    stored, prefix, names = stored_tensors(directory), f"{module.base_model_prefix}.", dict[str, str]()
    shapes = {tensor.name: tuple(tensor.shape) for tensor in layout.tensors}
    missing = []
    for own, known in names_of(module, layout):
        found = next((name for name in known if name in stored), None)
        if found is not None and own in may_lack:
            mine, theirs = shapes[own], stored[found].shape
            if mine[:1] == (module.config.num_labels,) and theirs[:1] != mine[:1] and theirs[1:] == mine[1:]:
                continue  # the last layer of a head for another number of labels
        if found is not None:
            names[own] = found
        elif own not in may_lack:
            missing.append(own)
    if missing:
        if kinds := sorted({one.form for one in stored.values() if one.form}):
            raise UserError(
                f"model: {directory} is published as {', '.join(kinds)}, and has no tensor for {listed(missing, 3)}: "
                "its config.json says another model, or it is published under other names than those of the model "
                "(experts one by one, where the model has stacks of them), which is not read; dequantize it first, or "
                "fetch it in 16 bits and pack it here (wire=int4)"
            )
        return None
    for name in saved_buffers(module):
        found = next((n for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None)
        names |= {} if found is None else {name: found}
    return names


def untied(directory: Path, first: str, other: str) -> UserError:
    return UserError(
        f"model: {directory} holds {first} and {other} with different values, but its config.json makes them one "
        "tensor; set tie_word_embeddings to false there if both are meant (Transformers 5 loads it so), or remove one"
    )


# -- what is left over -------------------------------------------------------------------------------------------------


def _find_unused(
    module: "PreTrainedModel", stored: Mapping[str, Stored], names: Mapping[str, str], directory: Path
) -> list[str]:
    """Names in the files that the module does not have, sorted. UserError for a scale beside a weight."""
    prefix, used = f"{module.base_model_prefix}.", set(names.values())
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    known = own | {name.removeprefix(prefix) for name in own} | {prefix + name for name in own} | used
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    left = [
        name
        for name in sorted(stored)
        if name not in known and not name.endswith(TABLES) and not any(pattern.search(name) for pattern in ignored)
    ]
    for name in left:
        weight, scale, _ = name.rpartition("_scale")
        if scale and weight in used:
            raise UserError(
                f"model: {directory} holds {name} beside {weight}, which is quantised in a format that is not read "
                "here; dequantize the model first, or fetch it in 16 bits"
            )
    return left


def unused_line(left: list[str]) -> list[str]:
    """A line for the start block, or none."""
    if not left:
        return []
    more = f", and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    count = f"{len(left)} {'tensor' if len(left) == 1 else 'tensors'} of the files"
    shown = f"{', '.join(left[:SHOWN])}{more}"
    return [f"warning: weights: {count} left out, which this config's model does not have: {shown}"]


def check_gguf_config(config: "PretrainedConfig", directory: Path) -> None:
    """UserError if the GGUF files of a directory, if it has some, contradict the config. A config with fewer layers is
    let through: the tensors that it leaves out are named."""
    text = config.get_text_config()
    rope = setting(text, "rope_parameters")
    for file, settings in gguf_settings(directory).items():
        for theirs, ours in GGUF_KEYS.items():
            mine = setting(text, ours)
            mine = rope.get(ours, mine) if ours == "rope_theta" and isinstance(rope, dict) else mine
            given, mine = finite(settings.get(theirs)), finite(mine)
            if given is None or mine is None or (theirs == "block_count" and mine <= given):
                continue
            if abs(given - mine) > NEAR * abs(mine):
                raise UserError(
                    f"model: {directory / file} says {theirs} = {given:.7g}, but config.json beside it says {ours} = "
                    f"{mine:.7g}: it is the config of another model; put that of the original model there"
                )


# -- models that were published in 4 or 8 bits -------------------------------------------------------------------------


def forms_in(directory: Path | None) -> dict[str, Stored]:
    """The quantised weights in a directory, by name."""
    if directory is None or not has_weights(directory):
        return {}
    return {name: stored for name, stored in stored_tensors(directory).items() if stored.form}


def choose_format(
    module: nn.Module, directory: Path | None, dtype: torch.dtype, wire: str | None
) -> tuple[Wire, list[str]]:
    """The formats of a model's homes, and lines for the start block."""
    forms = forms_in(directory)
    if not forms or directory is None:
        return Wire(dtype, wire), []
    check_gguf_config(module.config, directory)
    kinds = ", ".join(sorted({stored.form for stored in forms.values()}))
    if wire not in FROZEN:
        to = str(dtype).removeprefix("torch.") if wire is None else wire
        return Wire(dtype, wire), [f"weights: published as {kinds}; unpacked, and rounded once to {to}"]
    layout = find_layout(module)
    names = match_names(module, layout, directory) or {}  # it refuses where there are none: these are quantised
    inside = [t for u in layout.of_kind("block") for t in u.tensors if is_matrix(t.shape)]
    found = _one_grid(forms, names, inside)
    if isinstance(found, str) or found.name != wire:
        held, better = f": {found}", "null (16 bits)"
        if not isinstance(found, str):
            held, better = f"; {found.name} holds them exactly", found.name
        raise UserError(
            f"wire: {wire} would round the weights again, which were published as {kinds}{held}. Set wire={better}"
        )
    about = f"{found.name} with {found.per_group} in {found.scales}"
    return Wire(dtype, wire, found), [f"weights: published as {kinds}; blocks are taken over bit for bit, as {about}"]


def _one_grid(forms: dict[str, Stored], names: dict[str, str], inside: list[FlatTensor]) -> Grid | str:
    """The grid of all matrices of the blocks; or why there is no one grid."""
    if plain := [tensor.name for tensor in inside if names.get(tensor.name) not in forms]:
        return f"{len(plain)} of {len(inside)} matrices of the blocks are not quantised ({listed(plain, 1)})"
    grids, kinds = set[Grid](), set[str]()
    for tensor in inside:
        stored = forms[names[tensor.name]]
        if stored.grid is None:
            why = stored.of.why if stored.of is not None else f"{stored.form} is no format of a wire"
            return f"{tensor.name}: {why}"
        if tensor.shape.numel() % ALIGN:
            return f"the {tensor.shape.numel()} weights of {tensor.name} are no multiple of {ALIGN}"
        grids.add(Grid(*stored.grid))
        kinds.add(str(stored.form))
    if len(grids) == 1:
        return grids.pop()
    if grids:
        return f"the matrices of the blocks are of several types ({listed(sorted(kinds))}), and a wire has one"
    return "this model has no list of repeated blocks, whose matrices a packed wire keeps"


def forget_what_is_read(config: "PretrainedConfig", directory: Path | None = None) -> None:
    """Removes the quantization from a config, because the saved model has 16 bits, if keyhole reads weights of this
    kind: as the files in a directory are, or, if there are none, by what the config says."""
    said = setting(config, "quantization_config") or {}
    method = said.get("quant_method") if isinstance(said, dict) else setting(said, "quant_method")
    known = str(setting(method, "value", method)).lower() in READ
    if not (known and (directory is None or not has_weights(directory))) and not forms_in(directory):
        return
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
