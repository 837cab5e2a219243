"""What every family must pass: one step of LOMO is SGD, and streamed weights give the bits of resident ones.

lomo is sgd     one step of LOMO in fp32 against torch's SGD on the same module from Transformers: every weight to
                1e-5, and the change of every tensor to 0.1 % of itself, so that a lost gradient is seen, however
                small
lomo, zo        two steps: resident, and streamed in single matrices and experts, through slots that are poisoned when
                left

Every stack of experts counts as large here: it is computed, moved and updated one expert at a time where it can be.
"""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure import find
from keyhole.model.structure.layout import find_layout
from tests.families.tiny import tiny_config
from tests.methods.lomo.loops import weights
from tests.model.decoders import batch
from tests.model.streaming import streamed

LR = 0.5


def load(model_type: str, **changes: Any) -> keyhole.Model:
    """A tiny random model of this type, in fp32."""
    return keyhole.load(tiny_config(model_type, **changes), init="random", device="cpu", dtype="float32")


def sgd_step(model_type: str, state: dict[str, torch.Tensor], one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights after one step of torch's SGD from this state, on an ordinary module in evaluation mode."""
    module = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32).eval()
    module.load_state_dict(state, strict=True)
    logits_BTV = module(input_ids=one["input_ids"], use_cache=False).logits[:, :-1]
    F.cross_entropy(logits_BTV.flatten(0, 1), one["labels"][:, 1:].flatten()).backward()
    torch.optim.SGD(module.parameters(), lr=LR).step()
    return {name: p.detach() for name, p in module.named_parameters()}


def check_lomo_is_sgd(model_type: str) -> None:
    model, one = load(model_type), batch()
    before, state = weights(model), {name: x.clone() for name, x in model.module.state_dict().items()}
    keyhole.LOMO(model, LR).step(one)
    expected = sgd_step(model_type, state, one)
    moved = 0
    for name, after in weights(model).items():
        torch.testing.assert_close(after, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        change = (expected[name] - before[name]).norm()
        assert (after - expected[name]).norm() <= 1e-3 * change + 1e-6 * before[name].norm() + 1e-7, (
            f"{name}: its change is off"
        )
        moved += bool(change)
    trained = sum(tensor.param.requires_grad for tensor in model.layout.tensors)
    assert moved > trained / 2, f"{moved} of {trained} tensors have a gradient"


def check_streamed_is_resident(model_type: str, method: str) -> None:
    resident = load(model_type)
    finest = find_layout(resident.module, 1)
    slots = 1 if method == "zo" else max(Counter(unit.block for unit in finest.of_kind("block")).values())
    cut = streamed(resident, max_unit_numel=1, config=tiny_config(model_type), slot_count=slots, chaos=random.Random(0))
    made = {"lomo": lambda model: keyhole.LOMO(model, LR), "zo": lambda model: keyhole.ZO(model, 1e-3)}[method]
    both = [(model, made(model)) for model in (resident, cut)]
    for seed in range(2):
        losses = [optimizer.step(batch(seed=seed)) for _, optimizer in both]
        assert torch.isfinite(losses[0]) and torch.equal(*losses), f"losses {losses}"
    ours, theirs = (weights(model) for model, _ in both)
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"other bits in {different[0]} and {len(different) - 1} more"


CHECKS = {
    "lomo is sgd": check_lomo_is_sgd,
    "lomo streamed": lambda model_type: check_streamed_is_resident(model_type, "lomo"),
    "zo streamed": lambda model_type: check_streamed_is_resident(model_type, "zo"),
}


@contextmanager
def small_stacks() -> Iterator[None]:
    """A context in which every stack of experts counts as large."""
    before, find.STACK_NUMEL = find.STACK_NUMEL, 0
    try:
        yield
    finally:
        find.STACK_NUMEL = before


@small_stacks()
def outcome(model_type: str) -> str:
    """`passes`, `refused: why`, or what failed."""
    try:
        tiny_config(model_type)
    except Exception as error:
        return f"not built: {_said(error)}"
    for name, check in CHECKS.items():
        try:
            check(model_type)
        except UserError as error:
            return f"refused: {_said(error)}"
        except Exception as error:
            return f"failed: {name}: {_said(error)}"
    return "passes"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: " * (not isinstance(error, UserError)) + " ".join(str(error).split())[:300]
