"""An HF model without its weights: modules and shapes, but no memory.

Matrices are created on the meta device, so building a model of any size takes no memory and little time. Vectors
(norms, biases) and buffers (rotary tables) are real and initialised by the model's own code: they are tiny, and only
that code knows their values. Afterwards each matrix is replaced by a tensor of its shape that takes no memory, which
`Model` points to real memory later (a meta tensor could not be re-pointed).

Decoders can be built, and text classifiers: models whose architecture is called ...ForSequenceClassification, or with a
requested head (model/classification.py). Transformers also builds a "causal" model from the config of an encoder
(BERT), whose attention sees the tokens that it should predict: such a model reaches a loss of 0 and learns nothing.
"""

import copy
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from keyhole.errors import UserError, as_user_error
from keyhole.machine.held import alone, in_this_thread
from keyhole.model.structure.config_files import check_config_file, check_implementation, setting
from keyhole.model.structure.find import find_decoder
from keyhole.model.structure.reach import mark_use
from keyhole.model.structure.source import CLASSIFIER, check_directory, find_file, is_local

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

CHOOSE = "choose a causal language model, such as Llama, Qwen or OPT"


def _matrices_on_meta() -> AbstractContextManager[None]:
    """A context in which this thread makes matrices without memory; modules that others build are theirs."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.ndim > 1 and param.device.type != "meta":
            empty: Any = nn.Parameter(param.data.to("meta"), requires_grad=param.requires_grad)
            empty._is_hf_initialized = True  # initialising values would take half of the time of a build
            param = empty
        register(module, name, param)

    return in_this_thread(nn.Module, "register_parameter", register_on_meta)


def read_config(
    model: "str | Path | PretrainedConfig",
    trust_remote_code: bool = False,
    head: str | None = None,
    num_labels: int | None = None,
) -> "PretrainedConfig":
    """The HF config of a directory, a hub id, or a config object. head="classification": the config of a model that
    gives each text one of num_labels labels (1: a number), whatever the files were made for."""
    from transformers import AutoConfig, PretrainedConfig

    if not isinstance(model, PretrainedConfig):
        check_directory(model)
        path = Path(model)
        check_config_file(path / "config.json" if path.is_dir() else find_file(model, "config.json"))
    # values of the wrong type, keys of another version: the type of the error depends on the family
    with as_user_error(f"model: the config of {model!s:.300} cannot be read"):
        if not isinstance(model, PretrainedConfig):
            how = {"trust_remote_code": trust_remote_code, "local_files_only": is_local(model)}
            model = AutoConfig.from_pretrained(model, **how)
        return check_model(_with_head(model, head, num_labels))


def is_classifier(config: object) -> bool:
    """Whether a config is that of a text classifier."""
    return (setting(config, "architectures") or [""])[0].endswith(CLASSIFIER)


def _with_head(config: "PretrainedConfig", head: str | None, num_labels: int | None) -> "PretrainedConfig":
    """The config, or a copy of it with the requested head."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if head is None and num_labels is None:
        return config
    if head != "classification":
        raise UserError(f"head: {head!r} with num_labels {num_labels!r}; head=classification, or neither, is needed")
    if num_labels is None and not is_classifier(config):
        raise UserError("num_labels: how many labels there are is needed with head=classification (1: a number)")
    if num_labels is not None and (isinstance(num_labels, bool) or not isinstance(num_labels, int) or num_labels < 1):
        raise UserError(f"num_labels: {num_labels!r}; a whole number of at least 1 is needed")
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(f"head: transformers knows no classifier of type {config.model_type!r}; leave head out")
    config = copy.deepcopy(config)
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    if num_labels is not None and num_labels != config.num_labels:
        config.num_labels, config.problem_type = num_labels, None
    return config


def check_model(config: "PretrainedConfig") -> "PretrainedConfig":
    """The config itself; refused if it is neither that of a decoder nor that of a classifier."""
    from transformers.models.auto import modeling_auto

    classifiers, decoders = (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    )
    name, why = (setting(config, "architectures") or [type(config).__name__])[0], ""
    can_classify = type(config) in classifiers and not config.is_encoder_decoder
    if is_classifier(config):
        if not can_classify:
            raise UserError(
                f"model: {name} is no encoder or decoder with a head that transformers knows; choose BERT, RoBERTa, "
                "MPNet, or a causal language model"
            )
        return config
    if isinstance(config.get_text_config(), dict | list | str):
        raise UserError("model: its config.json has a text_config, which this family does not have; remove the key")
    if config.is_encoder_decoder:
        why = "it has an encoder and a decoder (is_encoder_decoder is true in its config)"
    elif key := _looks_ahead(config.get_text_config()):
        why = f"its attention sees the tokens it should predict ({key} in its config)"
    elif type(config) not in decoders and not setting(config, "auto_map"):
        why = f"transformers knows no causal language model of type {config.model_type!r}"
    if why:
        encoder = ", or make it a classifier: head=classification" if can_classify else ""
        raise UserError(f"model: {name} is not a decoder: {why}; {CHOOSE}{encoder}")
    return config


def _looks_ahead(config: "PretrainedConfig") -> str:
    """The setting that makes attention bidirectional; "" if there is none. is_decoder matters only for types that are
    encoders by default: other types (GPT-NeoX) have it too, and are decoders whatever its value."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    if config.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation"):
        key = "causal" if hasattr(config, "causal") else "is_decoder"
        return "" if setting(config, key) else f"{key} is false"
    bidirectional = {"is_causal": (False,), "use_bidirectional_attention": (True, "all"), "attn_type": ("bi",)}
    found = {key: setting(config, key) for key in bidirectional}
    return next((f"{key} is {value}" for key, value in found.items() if value in bidirectional[key]), "")


def auto_class(config: object) -> "type[PreTrainedModel]":
    """The class of Transformers that builds modules for a config."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if is_classifier(config) else AutoModelForCausalLM


@alone()  # Transformers changes torch's default dtype meanwhile
def build(
    config: "PretrainedConfig", dtype: torch.dtype, trust_remote_code: bool = False, *, expert_units: bool = True
) -> nn.Module:
    """The module for a config, in evaluation mode (no dropout), without memory for its matrices. Parameters that a
    forward pass on tokens does not use are frozen (reach.py); if they could not be determined, keyhole_untried is the
    reason. expert_units: large stacks of experts are computed and moved one expert at a time (find.py)."""
    check_model(config)
    if setting(config, "quantization_config"):
        raise UserError("model: config.json has a quantization_config; keyhole trains plain weights: dequantize first")
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        check_implementation("_attn_implementation", setting(part, "_attn_implementation"), type(part).__name__)
    with _matrices_on_meta():
        try:
            module = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
        except Exception as error:  # raised by the family's own code, on numbers that do not fit together
            why = " ".join(str(error).split()) or type(error).__name__
            raise UserError(f"model: no module can be built from {type(config).__name__}: {why}") from error
    _check_module(module, dtype)
    stand_ins: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                on_meta = param.device.type == "meta"
                data = torch.zeros((), dtype=dtype).expand(param.shape) if on_meta else param.data.to(dtype)
                own = nn.Parameter(data, requires_grad=param.requires_grad)
                owner._parameters[name] = stand_ins.setdefault(id(param), own)
    for name, buffer in saved_buffers(module).items():
        if any(part in name for part in module._keep_in_fp32_modules_strict or ()):
            buffer.data = buffer.data.float()
    module.eval()
    module.keyhole_untried = mark_use(module)
    module.keyhole_expert_units = expert_units
    return module


def _check_module(module: "PreTrainedModel", dtype: torch.dtype) -> None:
    """Refuses a model that does not look up its tokens in one table (CANINE: hashes of characters; I-BERT: a quantised
    table); one with a size of 0; one without blocks, which Transformers builds from 0 layers, or fewer, without a word:
    beside the embedding, all lists of modules are empty; and 16 bit where Transformers keeps some parameters in
    float32: units here have one dtype."""
    name = type(module).__name__
    try:
        embedding = module.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    if not isinstance(embedding, nn.Embedding):
        found = "none" if embedding is None else type(embedding).__name__
        raise UserError(f"model: {name} has no table of tokens (an nn.Embedding; found {found}), and is not supported")
    if (empty := next((own for own, param in module.named_parameters() if not param.numel()), None)) is not None:
        raise UserError(f"model: {name} would have no weights in {empty}: a size in its config is 0")
    body = find_decoder(module) if not is_classifier(module.config) else module.base_model
    lists = [part for part in body.modules() if isinstance(part, nn.ModuleList)]
    if lists and not any(map(len, lists)):
        count = setting(module.config.get_text_config(), "num_hidden_layers", "none")
        raise UserError(
            f"model: {name} would have no blocks: the number of layers in its config (num_hidden_layers, n_layer) is "
            f"{count}; set it to the number that the weight files have"
        )
    if kept := _kept_in_fp32(module, dtype):
        other = "bfloat16" if dtype == torch.float16 and not _kept_in_fp32(module, torch.bfloat16) else "float32"
        raise UserError(
            f"dtype: {str(dtype).removeprefix('torch.')}: Transformers keeps {len(kept)} parameters of {name} in "
            f"float32 ({kept[0]}, ...), and all parameters have one dtype here; set dtype={other}"
        )


def _kept_in_fp32(module: "PreTrainedModel", dtype: torch.dtype) -> list[str]:
    """Names of parameters that the family keeps in float32 whatever the dtype, or that its code converts to it."""
    patterns = [pattern.replace("*", ".*") for pattern in module._get_dtype_plan(dtype)]
    return [
        name
        for name, param in module.named_parameters()
        if any(re.search(pattern, name) for pattern in patterns)
        or (dtype.itemsize < 4 and param.dtype == torch.float32)
    ]


def saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that belong to a checkpoint (router corrections of some mixtures of experts), unlike rotary tables."""
    # not module.state_dict(), before which deferred updates are applied (forward/hooks.py): a checkpoint asks, too
    saved = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name in owner._buffers.keys() - owner._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}
