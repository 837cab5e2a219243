"""What a budget that is too small is told."""

import re
import warnings
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.workload import Workload
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.placement import place
from tests.model.decoders import config


def small(method: str, budget: str, how: str = "stream", **work: object) -> list[str]:
    """The reasons for the placement of a tiny model; or the refusal."""
    module, formats = build(config("llama"), torch.float32), Wire(torch.float32, None)
    return place(module, how, budget, formats, torch.device("cpu"), Workload(method, **work))[1].reasons


ADVICE = {  # what the message says, and what it must not say
    "zo": ({"passes": 2}, "Raise gpu_memory.", ("accumulation", "activations=host")),
    "lomo": ({"passes": 1}, "Raise gpu_memory.", ("perturbed", "zo.")),
    "adamw": ({"passes": 1}, "adamw cannot stream them. Raise gpu_memory", ("zo.", "activations", "perturbed")),
    "eval": ({"passes": 1}, "Raise gpu_memory, or use dtype=bfloat16.", ("batch_size", "perturbed", "tokens")),
    "replay": ({}, "Raise gpu_memory.", ("batch_size", "perturbed", "dtype")),
}


@pytest.mark.parametrize("case", ADVICE)
def test_too_small_a_budget_is_told_what_helps(case: str) -> None:
    """Sizes in a unit that shows them; nothing that is zero; what would fit is added where there is any."""
    work, says, not_said = ADVICE[case]
    with pytest.raises(UserError, match="^gpu_memory: 20KiB (is below the minimum|cannot hold)") as caught:
        small(case, "20KiB", **work)
    text = str(caught.value)
    assert says in text and not [word for word in not_said if word in text]
    assert "GiB" not in text and " 0B" not in text and "workspace" not in text  # there is none on a CPU


@pytest.mark.parametrize("how", ["stream", "resident"])
@pytest.mark.parametrize("method", ["zo", "lomo", "lsp"])
def test_the_minimum_that_is_named_is_enough(method: str, how: str) -> None:
    with pytest.raises(UserError, match="is below the .*Raise gpu_memory") as caught:
        small(method, "20KiB", how)
    least = re.search(r"[0-9.]+[KM]iB", str(caught.value).partition("is below")[2])[0]
    assert f"budget: {least}, not enforced on a CPU" in small(method, least, how)


def test_what_is_not_planned_is_not_refused() -> None:
    """The baselines' bytes are not known: a resident model is left to them."""
    assert small("adamw", "20KiB", "resident")


def said_to(method: type, **options: object) -> list[str]:
    """The warnings when a method is made on a tiny streamed model."""
    how = {"init": "random", "device": "cpu", "placement": "stream", "gpu_memory": "64MiB"}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        method(keyhole.load(config("llama"), **how | options))
    assert all(warning.filename == __file__ for warning in found)  # the line to change, not keyhole's own code
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("planned", "own", "count", "says"),
    [
        ({"settings": keyhole.LOMO.row.settings(activations="host")}, {}, 1, ""),
        ({"settings": keyhole.LOMO.row.settings()}, {"activations": "block"}, 1, 'settings(activations="block"))'),
        ({"passes": 1}, {"activations": "none"}, 1, 'settings=keyhole.LOMO.row.settings(activations="none"))'),
        ({"passes": 1}, {}, 2, '"lomo", passes=2, tokens=24)'),
        ({"tokens": 20}, {}, 1, ""),  # its rows are parted
        ({"tokens": 7}, {}, 1, '"lomo", passes=3, tokens=8)'),
        ({"tokens": 20}, {"budget": None}, 1, ""),
        ({"passes": 1, "length": 7}, {}, 1, "length=8)"),
        ({"passes": 1, "length": 8}, {"activations": "host"}, 1, ""),
        ({"method": "zo"}, {"directions": 2}, 1, '"zo", passes=4, tokens=24)'),
        ({"method": "zo", "passes": 4}, {"directions": 2}, 1, ""),
        ({"method": "zo", "passes": 1}, {"made": keyhole.LOMO}, 2, '"lomo", passes=2, tokens=24)'),
    ],
)
def test_all_sizes_of_a_step_are_compared(planned: Any, own: Any, count: int, says: str) -> None:
    """Tokens, micro-batches, directions, rows, what is kept; said once, with the workload that would hold the step."""
    work = keyhole.Workload(**{"method": "lomo", "tokens": 24} | planned)
    made = own.get("made", keyhole.ZO if work.method == "zo" else keyhole.LOMO)
    how = {"init": "random", "device": "cpu", "placement": "auto", "gpu_memory": own.get("budget", "64MiB")}
    model, ids = keyhole.load(config("llama"), workload=work, **how), torch.ones(3, 8, dtype=torch.long)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        opt = made(model, 1e-3, **{key: value for key, value in own.items() if key not in ("made", "budget")})
        model.nll({"input_ids": ids.repeat(2, 1), "labels": ids.repeat(2, 1)})  # no step was planned for it
        for _ in range(2):
            opt.step([{"input_ids": ids, "labels": ids}] * count)
    told = [str(one.message) for one in found if "a step is" in str(one.message)]
    assert len(told) == bool(says) and says in "".join(told)


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (keyhole.Workload("lom", tokens=8), "workload: there is no method 'lom'; did you mean lomo?"),
        (keyhole.Workload("lomo", tokens=-1), "workload: tokens: found -1, expected a whole number"),
        (keyhole.Workload("lomo", tokens="4096"), "workload: tokens: found '4096', expected a whole number"),
        (keyhole.Workload("lomo", passes=0), "workload: passes: found 0, expected"),
        ("lomo", "workload: found a str, expected keyhole.Workload"),
    ],
)
def test_a_workload_that_cannot_be_planned_is_refused(work: Any, says: str) -> None:
    """A misspelt method was planned as forward passes, -1 tokens as no memory."""
    with pytest.raises(UserError, match=re.escape(says)):
        keyhole.load(config("llama"), init="random", device="cpu", workload=work)


def test_a_budget_planned_for_another_method_is_said() -> None:
    """Only where it may be too small: a method with gradients on a model that was loaded for another."""
    [told] = said_to(keyhole.LOMO)
    assert "was planned for zo, and may not be enough for lomo" in told and 'Workload("lomo", tokens=...)' in told
    assert said_to(keyhole.ZO) == said_to(keyhole.LOMO, gpu_memory=None) == []
    assert said_to(keyhole.LOMO, workload=keyhole.Workload("lomo", tokens=64)) == []
