"""Calls of a model and a method: their arguments, the caller's modes of autograd, and threads."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.methods.lomo.loops import load, micro_batches, weights


@pytest.mark.parametrize("batch", [None, 3])
def test_what_is_no_batch_is_refused(batch: Any) -> None:
    """By its type."""
    with pytest.raises(UserError, match=f"batch: found a {type(batch).__name__}"):
        keyhole.LOMO(load("llama"), 1e-3).step(batch)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([[1, 2]], "found a list, expected the tokens"),
        (torch.zeros(1, 0, dtype=torch.long), r"found \(1, 0\) of int64"),
        (torch.zeros(3, dtype=torch.long), r"found \(3,\) of int64"),
        (torch.zeros(1, 3), r"found \(1, 3\) of float32"),
        (torch.full((1, 3), 10**6), "holds 1000000 to 1000000; the model has tokens 0 to"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(ids: Any, says: str) -> None:
    """By generation and by logits."""
    model = load("llama")
    for use in (model.generate, lambda given: model.logits({"input_ids": given}), lambda given: model.logits([given])):
        with pytest.raises(UserError, match=f"{says}|batch: found a (int|Tensor), expected a dict"):
            use(ids)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_model_is_saved_to_a_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty name, as an unset variable leaves it, is not this directory."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="save_pretrained: found .*, expected the path of a directory"):
        load("llama").save_pretrained(path)
    assert not list(tmp_path.iterdir())


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adamw"))
@pytest.mark.parametrize("name", METHODS)
def test_a_step_is_the_same_in_the_caller_s_no_grad_and_inference_mode(name: str) -> None:
    """Batches that were made there, too; the steps after it; and a model and a method that were made there, or flushed,
    or given a state."""
    if "lora" in name:
        pytest.importorskip("peft")
    found = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            model = load("llama")
            method = METHODS[name].load()(model, 1e-3, **({"d": 16, "r": 2} if name == "lsp" else {}))
            method.step([{key: x.clone() for key, x in batch.items()} for batch in micro_batches(0, 1)])
        method.step(micro_batches(1, 1))
        with mode():
            method.flush()
            method.load_state_dict(copy.deepcopy(method.state_dict()))
        method.step(micro_batches(2, 1))
        method.flush()
        found.append(weights(model))
    assert all(torch.equal(found[0][key], one[key]) for one in found for key in one)


@pytest.mark.parametrize("name", ["adamw", "lomo", "zo"])
def test_one_thread_at_a_time_uses_a_model(name: str) -> None:
    """A step or an evaluation of another thread is refused while a step is under way; it is not mixed with it."""
    method, alone = (METHODS[name].load()(load("llama"), 1e-3) for _ in range(2))
    (batch,) = micro_batches(0, 1)
    refused: list[str] = []

    def use() -> None:
        for call in (method.step, method.model.nll, method.model.logits):
            try:
                call(batch)
            except UserError as error:
                refused.append(str(error))

    def from_another_thread(*args: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()

    hook = method.model.module.model.norm.register_forward_pre_hook(from_another_thread)
    losses = [float(method.step(batch))]
    assert len(refused) == 3 and all("another thread" in text for text in refused)
    losses.append(float(method.step(batch)))
    assert losses == [float(alone.step(batch)) for _ in range(2)]
