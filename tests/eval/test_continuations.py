"""Log-likelihoods of continuations: those of a plain forward, whatever shares a row or a batch, streamed or not."""

from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.eval.continuations import score_continuations
from keyhole.ops.loss import RunningChoice

LENGTH = 24


def pairs() -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: torch.randint(5, 200, (n,), generator=generator).tolist()  # noqa: E731
    context = draw(9)
    found = [(context, [i]) for i in (7, 8, 9)]  # share a row
    found += [(context[:6], [*context[6:], 7]), (draw(3), draw(5)), (draw(40), draw(4)), (draw(1), draw(LENGTH))]
    return found


def plain(model: keyhole.Model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation][-(LENGTH + 1) :]])
    logits = model.module(ids[:, :-1]).logits[0, -len(continuation) :].double()
    target = torch.tensor(continuation)
    return float(logits.log_softmax(-1)[range(len(target)), target].sum()), bool((logits.argmax(-1) == target).all())


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_scores_are_those_of_a_plain_forward(tiny_model: Path, placement: str, batch_tokens: int) -> None:
    """Each pair alone through the module gives the same sum and the same verdict, a greedy continuation included."""
    plain_model = keyhole.load(tiny_model, device="cpu")
    asked = pairs()
    start = asked[4][0]
    asked.append(
        (start, plain_model.generate(torch.tensor([start]), max_new_tokens=3, do_sample=False)[0, 3:].tolist())
    )
    with torch.no_grad():
        expected = [plain(plain_model, *pair) for pair in asked]
    model = keyhole.load(tiny_model, device="cpu", placement=placement)
    sums, greedy = score_continuations(model, asked, LENGTH, batch_tokens=batch_tokens, passes=2)
    assert sums == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert greedy == [verdict for _, verdict in expected] and greedy[-1] and not all(greedy)


def test_pairs_that_differ_in_the_last_token_share_a_row(tiny_model: Path) -> None:
    """Four of the pairs are one row of tokens."""
    model = keyhole.load(tiny_model, device="cpu")
    rows = []
    scores = model.token_scores
    model.token_scores = lambda batches: rows.extend(b.loss.row_count for b in batches) or scores(batches)
    score_continuations(model, pairs(), LENGTH)
    assert sum(rows) == len(pairs()) - 3


@pytest.mark.parametrize("pair", [([], [5]), ([5], []), ([5], [6] * (LENGTH + 1))])
def test_a_pair_that_cannot_be_scored_is_refused(tiny_model: Path, pair: tuple[list[int], list[int]]) -> None:
    with pytest.raises(UserError, match="tokens of context"):
        score_continuations(keyhole.load(tiny_model, device="cpu"), [pair], LENGTH)


def test_the_first_of_equal_logits_is_the_best() -> None:
    """As torch.argmax has it, whatever the chunks."""
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, -1.0, 0.0, 5.0, 5.0]])
    for cut in range(1, 5):
        state = RunningChoice(torch.tensor([0, 1]))
        state.add(logits[:, :cut], 0)
        state.add(logits[:, cut:], cut)
        assert state.best_N.tolist() == logits.argmax(1).tolist() == [1, 3]
