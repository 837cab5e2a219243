"""Loss on held-out data."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.model.forward.memory import evaluation_bytes
from keyhole.training import validation as module
from keyhole.training.validation import evaluate, shown, shown_loss


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of trained tokens, one row padded."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for i in range(count):
        ids_BT = torch.randint(0, 256, (2, 8 + i), generator=generator)
        labels_BT, mask_BT = ids_BT.clone(), torch.ones_like(ids_BT)
        labels_BT[0, : 3 + i] = -100
        labels_BT[1, -2:], mask_BT[1, -2:] = -100, 0
        made.append({"input_ids": ids_BT, "labels": labels_BT, "attention_mask": mask_BT})
    return made


def test_is_the_mean_over_all_tokens(tiny_model: Path) -> None:
    """Tokens count alike, whichever batch they are in, as one forward of transformers gives them."""
    found = evaluate(keyhole.load(tiny_model, device="cpu"), batches(3))
    theirs = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    nll, count = 0.0, 0
    for batch in batches(3):
        with torch.no_grad():
            trained = int((batch["labels"][:, 1:] != -100).sum())
            nll, count = nll + float(theirs(**batch).loss) * trained, count + trained
    assert found["eval_tokens"] == count
    assert found["eval_loss"] == pytest.approx(nll / count, rel=1e-5)


@pytest.mark.parametrize("passes", [1, 2, 8])
def test_streamed_in_groups_of_any_size(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, passes: int) -> None:
    """Batches that cross the link together give the bits that a resident model gives one by one."""
    monkeypatch.setattr(module, "EVAL_PASSES", passes)
    streamed = keyhole.load(tiny_model, device="cpu", placement="stream")
    assert evaluate(streamed, batches(5)) == evaluate(keyhole.load(tiny_model, device="cpu"), batches(5))


def test_gives_up_when_told(tiny_model: Path) -> None:
    """An interrupted evaluation has no result, rather than one of half the data."""
    asked = iter([False, True])
    assert evaluate(keyhole.load(tiny_model, device="cpu"), batches(3), lambda: next(asked)) is None


def test_a_tight_budget_evaluates_fewer_batches_together(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training planned two passes; eight at the first evaluation would be out of memory. The loss is the same."""
    losses, groups = [], []
    for budget in ("330KiB", None):
        work = keyhole.Workload("zo", tokens=32, passes=2)
        model = keyhole.load(tiny_model, device="cpu", placement="stream", gpu_memory=budget, workload=work)
        sizes = []
        nll = model.nll
        monkeypatch.setattr(model, "nll", lambda group, sizes=sizes, nll=nll: sizes.append(len(group)) or nll(group))
        losses.append(evaluate(model, batches(8))["eval_loss"])
        groups.append(max(sizes))
        if budget is not None:
            sizes = {"tokens": 32, "formats": model.placed.formats, "workspace_bytes": 0}
            needed, planned = evaluation_bytes(model.layout, passes=groups[0], **sizes), model.placed.device_bytes
            assert needed <= planned.during_a_step + model.placed.budget_bytes - planned.total
    assert losses[0] == losses[1] and groups[0] < 8 == groups[1]


def test_numbers_are_shown_as_published() -> None:
    """Percent, but of correlations and of a mean of different metrics; a loss over what it is the mean of."""
    assert shown_loss({"eval_loss": 0.25, "eval_rows": 1200}) == "loss 0.2500 over 1,200 rows"
    tokens = {"eval_loss": 1.0, "perplexity": 2.718, "eval_tokens": 1}
    assert shown_loss(tokens) == "loss 1.0000, perplexity 2.72 over 1 token"
    found = {"eval_loss": 1.0, "eval_accuracy": 0.8841, "eval_matthews": 0.5, "eval_score": 0.25, "test_f1": 0.5}
    assert (
        shown(found | {"eval_questions": 500}, "eval") == "accuracy 88.4 %, matthews 50.0, score 25.0 of 500 questions"
    )
    assert shown({"eval_word_perplexity": 2.0, "eval_questions": 1}, "eval") == "word_perplexity 2.000 of 1 question"
    assert shown(found, "eval") == shown({"eval_loss": 1.0, "eval_rows": 3, "eval_questions": 2}, "eval") == ""
