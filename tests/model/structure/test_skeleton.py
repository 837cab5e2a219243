"""A module without its weights: no memory, the right shapes, ties kept, buffers real."""

import resource

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import build, read_config, saved_buffers
from tests.families.tiny import tiny_config
from tests.model.decoders import NAMES, config


@pytest.mark.parametrize("name", NAMES)
def test_shapes_ties_and_buffers_are_those_of_hugging_face(name: str) -> None:
    """Every parameter and buffer of an ordinary model is there, in shape and dtype; tied ones are one object."""
    ours, theirs = build(config(name), torch.float32), AutoModelForCausalLM.from_config(config(name))
    assert not ours.training
    found = {key: p.shape for key, p in ours.named_parameters(remove_duplicate=False)}
    assert found == {key: p.shape for key, p in theirs.named_parameters(remove_duplicate=False)}
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in theirs.named_parameters()]
    buffers = dict(theirs.named_buffers())
    for key, buffer in ours.named_buffers():
        assert buffer.device.type == "cpu" and torch.equal(buffer, buffers.pop(key)), key
    assert not buffers
    assert (ours.get_output_embeddings().weight is ours.get_input_embeddings().weight) == (
        theirs.get_output_embeddings().weight is theirs.get_input_embeddings().weight
    )


def test_a_large_model_takes_no_memory() -> None:
    """Eight blocks of OPT-175B, 29 GB of them, are built in this process."""
    shape = {"hidden_size": 12288, "ffn_dim": 49152, "num_hidden_layers": 8, "num_attention_heads": 96}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = build(config("opt", **shape, word_embed_proj_dim=12288, vocab_size=50272), torch.bfloat16)
    assert sum(p.numel() for p in module.parameters()) > 14.5e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


def test_matrices_can_be_pointed_elsewhere() -> None:
    """What stands in for a matrix accepts real memory later, and registration of parameters is as before."""
    module = build(config("llama"), torch.bfloat16)
    weight = module.model.layers[0].mlp.up_proj.weight
    weight.data = torch.ones(weight.shape, dtype=torch.bfloat16)
    assert weight.sum() == weight.numel()
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_saved_buffers_keep_their_precision() -> None:
    """The router's correction is part of the checkpoint and stays in fp32; rotary tables are not part of it."""
    module = build(config("deepseek_v3"), torch.bfloat16)
    assert {name.rsplit(".", 1)[1] for name in saved_buffers(module)} == {"e_score_correction_bias"}
    assert all(buffer.dtype == torch.float32 for buffer in saved_buffers(module).values())
    assert saved_buffers(build(config("llama"), torch.bfloat16)) == {}


_TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
NOT_DECODERS = {
    "BertForMaskedLM": (hf.BertConfig(**_TINY, architectures=["BertForMaskedLM"]), "is_decoder is false"),
    "RobertaConfig": (hf.RobertaConfig(**_TINY), "is_decoder is false"),
    "XLMConfig": (hf.XLMConfig(), "causal is false"),
    "XLNetConfig": (hf.XLNetConfig(), "attn_type is bi"),
    "Gemma3TextConfig": (config("gemma3", use_bidirectional_attention=True), "use_bidirectional_attention is True"),
    "T5Config": (hf.T5Config(), "an encoder and a decoder"),
    "BartConfig": (hf.BartConfig(), "an encoder and a decoder"),
    "DistilBertConfig": (hf.DistilBertConfig(), "is_decoder is false"),
    "ViTConfig": (hf.ViTConfig(), "no causal language model of type 'vit'"),
}


@pytest.mark.parametrize("name", NOT_DECODERS)
def test_what_is_no_decoder_is_refused_by_its_name(name: str) -> None:
    """Encoders, whose labels would leak, and encoder-decoders: one line, by the architecture and the setting."""
    made, why = NOT_DECODERS[name]
    for ask in (read_config, lambda one: build(one, torch.float32)):
        with pytest.raises(UserError, match=f"^model: {name} is not a decoder: .*{why}") as caught:
            ask(made)
        assert len(str(caught.value)) < 250
        is_classifier = name in ("BertForMaskedLM", "RobertaConfig", "XLMConfig", "DistilBertConfig")
        assert ("head=classification" in str(caught.value)) >= is_classifier


def test_an_encoder_made_a_decoder_is_one() -> None:
    """BERT with is_decoder: a change of the last token changes no logits before it."""
    made = hf.BertConfig(**_TINY, is_decoder=True)
    assert read_config(made) is made and build(made, torch.float32)
    module = AutoModelForCausalLM.from_config(made).eval()
    ids = torch.arange(3, 11)[None]
    other = ids.clone()
    other[0, -1] = 50
    assert torch.equal(module(ids).logits[0, :-1], module(other).logits[0, :-1])


@pytest.mark.parametrize("name", NAMES)
def test_a_model_needs_blocks(name: str) -> None:
    """No family is built with 0 layers."""
    made = config(name)
    made.get_text_config().num_hidden_layers = 0
    with pytest.raises(UserError, match="model: "):
        build(made, torch.float32)


@pytest.mark.parametrize("family, found", [("ibert", "QuantEmbedding"), ("canine", "none")])
def test_a_model_without_a_table_of_tokens_is_refused(family: str, found: str) -> None:
    with pytest.raises(UserError, match=rf"no table of tokens \(an nn.Embedding; found {found}\)"):
        keyhole.load(tiny_config(family), init="random", device="cpu", head="classification", num_labels=2)
