"""N steps, a stop and M more are N + M steps, to the bit: the state of a method holds all that its rule remembers."""

from typing import Any, NamedTuple

import pytest
import torch

import keyhole
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.methods.lomo.loops import load as load_plain
from tests.methods.lomo.loops import micro_batches
from tests.methods.lsp.loops import SOON
from tests.methods.test_dropout import FIRST_ORDER, OWN
from tests.methods.test_dropout import load as load_with_dropout
from tests.model.streaming import streamed, trained


class Case(NamedTuple):
    """streams: the second part, too, with weights elsewhere. resumed: settings of the second part alone."""

    method: str
    options: dict[str, Any] = {}
    dtype: str = "float32"
    family: str = "llama"
    streams: bool = False
    drops: bool = False
    often: bool = False
    resumed: dict[str, Any] = {}


ADAM = {"weight_decay": 0.1, "weight_decay_on": "all", "beta2": 0.99}
LOW = {"rank": 2, "refresh": 2, "eps": 1e-2}  # three steps end in the middle of a period
FITS = SOON | {"fit_steps": 5}  # in the middle of a subspace's life, and after it was replaced
CASES = [
    Case("adam-offload", ADAM | {"max_grad_norm": 0.5}, "bfloat16", streams=True, often=True),
    Case("adam-offload", ADAM, "bfloat16", streams=True),
    Case("apollo-mini", {"refresh": 3}, often=True),
    Case("galore", {"rank": 4, "update_proj_gap": 2}, often=True),
    Case("lomo"),
    Case("lomo", {"rounding": "kahan"}, "bfloat16", often=True),
    Case("adalomo", often=True),
    Case("adalomo", {"rounding": "kahan"}, "bfloat16"),
    Case("lsp", {"optimizer_on": "gpu"} | FITS, "bfloat16", often=True),
    Case("lsp", {"optimizer_on": "cpu", "max_grad_norm": 0.7} | FITS, often=True),
    Case("lsp", {"optimizer_on": "gpu", "preset": "paper"} | FITS, often=True),
    Case("muon", {}, "bfloat16", streams=True, often=True),
    Case("muon", {"max_grad_norm": 0.5}, "bfloat16", streams=True, often=True),
    *(Case("zo", {"directions": 3, "weight_decay": 0.1, "estimator": name}, often=True) for name in ("mezo", "fzoo")),
    Case("zo", LOW, "bfloat16", "opt", often=True),
    Case("zo", LOW, family="opt"),
    Case("zo", LOW | {"fold": False}, "bfloat16", "opt"),
    Case("zo", LOW | {"fold": False}, family="opt", often=True),
    Case("zo", LOW | {"guide": 64}, often=True),
    Case("zo", LOW | {"guide": 64, "refresh": 3}),
    Case("zo", LOW | {"guide": 64, "fold": False}),
    Case("zo", LOW | {"guide": 64, "fold": False, "refresh": 3}, often=True),
    Case("lora", {"r": 4, "dropout": 0.3, "activations": "none"}, often=True, resumed={"activations": "block"}),
    *(Case(name, OWN.get(name, {}), drops=True, often=name in ("lomo", "lsp", "adam-offload")) for name in FIRST_ORDER),
]
CASES += [case._replace(dtype="bfloat16") for case in CASES if case.method in ("lomo", "adalomo") and not case.options]


def train(opt: Any, first: int, last: int) -> list[float]:
    losses = []
    for t in range(first, last):
        opt.lr = 1e-2 * (1 - t / 20)
        losses.append(float(opt.step(micro_batches(t, 2))))
    return losses


@in_every_run(lambda case: case.often)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.method)
def test_n_plus_m_steps_are_n_a_stop_and_m(case: Case) -> None:
    """Who forgets flush() saves all the same, and nobody else's generator moves."""
    generator = torch.get_rng_state()

    def load() -> keyhole.Model:
        return load_with_dropout(dtype=case.dtype) if case.drops else load_plain(case.family, dtype=case.dtype)

    def make(model: keyhole.Model, more: dict[str, Any]) -> Any:
        return METHODS[case.method].load()(model, 1e-2, **case.options | more)

    whole, first = make(load(), {}), make(load(), {})
    losses = train(whole, 0, 5)
    train(first, 0, 3)
    state = {key: value.clone() if torch.is_tensor(value) else value for key, value in first.state_dict().items()}
    for away in (False, True) if case.streams else (False,):
        model = load()
        homes = {tensor.name: model.home(tensor) for tensor in model.layout.tensors}
        if not METHODS[case.method].keeps_base and case.method != "adam-offload":  # whose state holds the weights
            for name, saved in first.model.named_tensors(merged=False):
                homes[name].copy_(saved)
        second = make(streamed(model) if away else model, case.resumed)
        second.load_state_dict(state)
        assert train(second, 3, 5) == losses[3:]
        for mine, theirs in (trained(second), trained(whole)), (second.state_dict(), whole.state_dict()):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(x, mine[key]) if torch.is_tensor(x) else x == mine[key] for key, x in theirs.items())
    if case.method == "lsp":
        assert max(target.generation for target in whole.targets.values()) > 1
    assert torch.equal(torch.get_rng_state(), generator)
