"""Which hooks keep a block from being replayed."""

import torch
from torch import nn

import keyhole
from keyhole.model.forward.users_hooks import UsersHooks
from tests.model.decoders import batch, config


def test_hooks_of_users_are_told_from_those_that_are_always_there() -> None:
    """On any module, of any kind, and for all modules; not keyhole's own, and not those with which Transformers
    collects hidden states."""
    model = keyhole.load(config("llama"), init="random", device="cpu")
    hooks, layer = UsersHooks(model.module.modules()), model.module.model.layers[1].mlp.up_proj
    assert not hooks.any()
    with torch.no_grad():
        model.module(input_ids=batch()["input_ids"], output_hidden_states=True, output_attentions=True)
    assert not hooks.any()
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *args: None)
        assert hooks.any(), register
        handle.remove()
        assert not hooks.any(), register
