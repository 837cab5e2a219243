"""The order is a pure function of seed and epoch, resuming is exact, and widths are few and change nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keyhole
from keyhole.data.batches import (
    Batch,
    EvalBatches,
    Loader,
    Padding,
    _splitmix64,
    choose_padding,
    collate,
    make_batch,
    order,
    stratified_order,
    stratifies,
)
from keyhole.data.dataset import Dataset, Sample
from keyhole.errors import UserError
from tests.training.classifiers import save_encoder

PAIRS = [[i, i + 1] for i in range(0, 10, 2)]
KINDS = {"rows": {}, "packed": {"rows": PAIRS}, "questions": {"questions": (PAIRS, [0, 1, 0, 1, 0])}}


def rows(lengths: list[int], **about: object) -> Dataset:
    """Sample i is so many tokens of value i, all of them trained."""
    return Dataset([np.full(n, i) for i, n in enumerate(lengths)], [np.ones(n, dtype=bool) for n in lengths], **about)


def dataset(count: int, packed: bool = False) -> Dataset:
    return rows([i + 2 for i in range(count)], rows=[[i] for i in range(count)] if packed else None)


def seen(step: list[Batch]) -> list[int]:
    return [int(row[0]) for batch in step for row in batch["input_ids"]]


SIZES = {"count": st.integers(1, 30), "batch_size": st.integers(1, 5), "steps": st.integers(1, 4)}


@given(**SIZES, seed=st.integers(-(2**40), 2**64))
def test_every_sample_once_an_epoch(count: int, batch_size: int, steps: int, seed: int) -> None:
    loader = Loader(dataset(count), batch_size, steps, seed=seed)
    for epoch in range(2):
        taken = [loader.next_step() for _ in range(loader.steps_per_epoch)]
        assert sorted(i for step in taken for i in seen(step)) == list(range(count))
        assert all(len(seen(step)) == batch_size * steps for step in taken[:-1])
        assert all(len(batch["input_ids"]) == batch_size for step in taken for batch in step[:-1])
        assert all(step and all(len(b["input_ids"]) for b in step) for step in taken)
        assert loader.epoch == epoch + 1


@given(**SIZES, before=st.integers(0, 12), after=st.integers(1, 12), seed=st.integers(0, 1000))
def test_resume_is_exact(count: int, batch_size: int, steps: int, before: int, after: int, seed: int) -> None:
    """N + M steps are N steps, a state through JSON, a new loader, and M steps, tensor for tensor."""
    data = dataset(count)
    straight = Loader(data, batch_size, steps, seed=seed)
    for _ in range(before):
        straight.next_step()
    resumed = Loader(data, batch_size, steps, seed=seed)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    assert resumed.epoch == straight.epoch
    for _ in range(after):
        for a, b in zip(next(straight), next(resumed), strict=True):
            assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_offset_counts_rows() -> None:
    first, second = Loader(dataset(20), 4), Loader(dataset(20), 2, 3)
    head = seen(first.next_step())
    second.load_state_dict(first.state_dict())
    assert sorted(head + [i for _ in range(3) for i in seen(second.next_step())]) == list(range(20))


def test_orders_are_what_they_have_always_been() -> None:
    """Stored values: a library update that changed the order would break every resume."""
    assert order(8, 0, 0).tolist() == [4, 6, 7, 2, 1, 5, 3, 0]
    assert order(8, 0, 1).tolist() == [7, 1, 0, 6, 4, 5, 2, 3]
    assert order(8, 1, 0).tolist() == [3, 6, 7, 2, 5, 0, 4, 1]
    assert int(_splitmix64(np.uint64(0))) == 0xE220A8397B1DCDAF  # the published first output for seed 0


def test_other_data_another_seed_or_another_order_is_refused() -> None:
    """A position in other data means nothing; the error says what to restore."""
    state = Loader(dataset(5), 2).state_dict()
    with pytest.raises(UserError, match=r"not those of the checkpoint \(5 rows then, 6 now"):
        Loader(dataset(6), 2).load_state_dict(state)
    with pytest.raises(UserError, match="not those of the checkpoint"):
        Loader(dataset(5, packed=True), 2).load_state_dict(state)
    with pytest.raises(UserError, match="seed=1, but the checkpoint's is 0"):
        Loader(dataset(5), 2, seed=1).load_state_dict(state)
    data = rows([2] * 4, classes=[0, 1, 0, 1])
    state = Loader(data, 2).state_dict()
    with pytest.raises(UserError, match="stratified=True, but the checkpoint's is False"):
        Loader(data, 2, stratified=True).load_state_dict(state)


def test_collate_pads_on_the_right() -> None:
    batch = collate([Sample([1, 2, 3], [-100, 2, 3]), Sample([4], [-100])], 9, 8)
    assert all(x.shape == (2, 8) and x.dtype == torch.int64 for x in batch.values())
    assert batch["input_ids"].tolist() == [[1, 2, 3, 9, 9, 9, 9, 9], [4, 9, 9, 9, 9, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 2, 3] + [-100] * 5, [-100] * 8]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=4, max_size=12),
    kind=st.sampled_from(["plain", "packed", "questions", "classes", "values with types"]),
    multiple=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_a_batch_is_its_rows_padded_one_by_one(lengths: list[int], kind: str, multiple: int, seed: int) -> None:
    """The tokens of all rows are placed at once; here row by row, from the samples that a data set shows. Padding of
    packed rows is one more sample, with positions from 0, and there is no mask."""
    draw, count = np.random.default_rng(seed), len(lengths)
    ids = [draw.integers(0, 99, n).astype(np.int32) for n in lengths]
    trained = [draw.random(n) < 0.5 for n in lengths]
    halves = [list(range(count // 2)), list(range(count // 2, count))]
    right = [int(draw.integers(len(half))) for half in halves]
    how = {
        "plain": {},
        "packed": {"rows": halves},
        "questions": {"questions": (halves, right)},
        "classes": {"targets": draw.integers(0, 3, count).tolist()},
        "values with types": {"targets": draw.random(count).tolist(), "types": [[1] * n for n in lengths]},
    }
    data = Dataset(ids, trained, pad_token_id=7, **how[kind])
    chosen = draw.permutation(len(data)).tolist()
    alone = Dataset(ids, trained)
    samples = [alone[k] for i in chosen for k in halves[i]] if kind == "questions" else [data[i] for i in chosen]
    width = -(-max(len(s.input_ids) for s in samples) // multiple) * multiple
    gaps = [width - len(s.input_ids) for s in samples]
    expected = {"input_ids": [s.input_ids + [7] * gap for s, gap in zip(samples, gaps, strict=True)]}
    expected["labels"] = [s.labels + [-100] * gap for s, gap in zip(samples, gaps, strict=True)]
    if kind == "packed":
        positions = [s.position_ids + list(range(gap)) for s, gap in zip(samples, gaps, strict=True)]
        expected["position_ids"] = positions
    else:
        expected["attention_mask"] = [[1] * (width - gap) + [0] * gap for gap in gaps]
    if samples[0].target is not None:
        expected["labels"] = [s.target for s in samples]
    if kind == "values with types":
        expected["token_type_ids"] = expected["attention_mask"]
    if kind == "questions":
        expected["question"] = [q for q, i in enumerate(chosen) for _ in halves[i]]
        expected["answer"] = [int(k == right[i]) for i in chosen for k in range(len(halves[i]))]
    found = make_batch(data, chosen, Padding(multiple))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], torch.tensor(x)) and found[name].dtype == torch.tensor(x).dtype, name


def test_where_names_the_samples_of_the_last_step() -> None:
    loader, names = Loader(dataset(9), 3, 2), [f"sample {i + 1}" for i in order(9, 0, 0)]
    loader.next_step()
    assert loader.where(2) == "; ".join(names[:2]) + "; and 4 more"
    loader.next_step()
    assert loader.where() == "; ".join(names[6:])


def test_eval_batches_come_in_order_and_again() -> None:
    batches = EvalBatches(dataset(5), 2)
    assert len(batches) == 3 and batches
    assert [seen([b]) for b in batches] == [[0, 1], [2, 3], [4]] == [seen([b]) for b in batches]
    assert not EvalBatches(None, 2) and list(EvalBatches(None, 2)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_coming_rows_are_those_of_the_next_steps(kind: str) -> None:
    lengths = [3, 5, 2, 4, 6, 3, 2, 5, 4, 3]
    ids = [np.arange(10 * i, 10 * i + n, dtype=np.int32) for i, n in enumerate(lengths)]
    data = Dataset(ids, [np.ones(n, dtype=bool) for n in lengths], **KINDS[kind])
    loader = Loader(data, batch_size=2)
    loader.next_step()
    before = loader.position

    def content(found: list[Batch]) -> list[tuple[int, ...]]:
        return [tuple(x for x in row if x) for one in found for row in one["input_ids"].tolist()]

    coming = content(loader.coming(100, 12))
    assert loader.position == before
    next_rows = content([one for _ in range(2 * len(data)) for one in loader.next_step()])
    assert coming == list(dict.fromkeys(next_rows))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_coming_rows_are_bounded_with_their_padding(kind: str) -> None:
    """One long row among short ones makes small batches of those beside it alone."""
    pairs = [[i, i + 1] for i in range(0, 60, 2)]
    about = {"packed": {"rows": pairs}, "questions": {"questions": (pairs, [0] * 30)}}.get(kind, {})
    loader = Loader(rows([100 if i == 17 else 4 for i in range(60)], **about), batch_size=2)
    coming = loader.coming(60, 160)
    per_row = 2 if kind == "questions" else 1
    for one in coming:
        assert one["input_ids"].numel() <= 160 or len(one["input_ids"]) == 2 * per_row
    assert sum(len(one["input_ids"]) for one in coming) == per_row * len(loader.dataset)
    assert max(len(one["input_ids"]) for one in coming) > 2 * per_row


CLASSES = st.lists(st.integers(0, 3), min_size=2, max_size=60).filter(lambda found: len(set(found)) > 1)


@given(CLASSES, st.integers(0, 2**63), st.integers(0, 3), st.integers(1, 20))
def test_batches_have_the_shares_of_the_whole(classes: list[int], seed: int, epoch: int, size: int) -> None:
    """Any `size` consecutive rows have size n_c / N rows of a class, to less than 1 + C n_c / N."""
    class_N = np.array(classes)
    order_N = stratified_order(class_N, seed, epoch)
    assert sorted(order_N) == list(range(len(classes)))
    counts, number = np.bincount(class_N, minlength=4), len(set(classes))
    for begin in range(max(1, len(classes) - size)):
        part = order_N[begin : begin + size]
        found = np.bincount(class_N[part], minlength=4)
        expected = len(part) * counts / len(classes)
        assert (abs(found - expected) < 1 + number * counts / len(classes) + 1e-9).all()


def test_two_equal_classes_alternate_in_shuffled_order() -> None:
    """8 and 8 in every batch of 16; within a class, rows keep the order of the shuffle; epochs and seeds differ."""
    class_N = np.arange(320) % 2
    found = stratified_order(class_N, 0, 0)
    assert all(class_N[found[i : i + 16]].sum() == 8 for i in range(0, 320, 16))
    shuffled = order(320, 0, 0)
    assert all((found[class_N[found] == c] == shuffled[class_N[shuffled] == c]).all() for c in (0, 1))
    others = [stratified_order(class_N, *where) for where in ((0, 1), (1, 0))]
    assert all((found != other).any() for other in others) and (found == stratified_order(class_N, 0, 0)).all()


def test_what_auto_stratifies() -> None:
    """Stratified if there are several classes and rows are of one class each; a wish for more is refused."""
    several, same, none = rows([2] * 3, classes=[0, 1, 1]), rows([2] * 2, classes=[2, 2]), rows([2] * 3)
    packed = rows([2] * 3, classes=[0, 1, 1], rows=[[0], [1], [2]])
    assert [stratifies(data, "auto") for data in (several, packed, same, none)] == [True, False, False, False]
    assert not stratifies(several, False) and stratifies(several, True)
    with pytest.raises(UserError, match="stratify: true needs rows with labels"):
        stratifies(packed, True)
    several.choose([1, 2, 2])
    assert not stratifies(several, "auto")


@given(longest=st.integers(2, 1024), positions=st.none() | st.integers(2, 2048))
def test_auto_has_at_most_eight_widths(longest: int, positions: int | None) -> None:
    """Short rows fall into eight widths or fewer; none is too narrow, or wider than the longest row rounded up to 8,
    and none passes the last position of a model that has so many."""
    padding = choose_padding(rows([2, longest]), "auto", positions)
    widths = {n: padding.width(n) for n in range(1, longest + 1)}
    assert len(set(widths.values())) <= 8
    assert all(n <= width <= -(-longest // 8) * 8 for n, width in widths.items())
    assert positions is None or longest > positions or max(widths.values()) <= positions


def test_a_number_and_null_mean_what_they_say() -> None:
    """64 is multiples of 64, null is the longest row; a number that would pass the last position is 1. A shorter eval
    set has no widths of its own, but for its last one."""
    data = rows([5, 100])
    assert [choose_padding(data, 64, None).width(n) for n in (5, 64, 65)] == [64, 64, 128]
    assert choose_padding(data, None, None).width(37) == 37
    assert choose_padding(data, 8, 100) == Padding(1)
    assert choose_padding(data, 8, 104) == choose_padding(data, 8, None) == Padding(8)
    assert choose_padding(rows([3, 40]), "auto", None, multiple=64) == Padding(64, 40)


def test_the_report_counts_padding_by_hand() -> None:
    """Rows of 4, 10 and 6 tokens in a batch: 20 tokens, padded to multiples of 8 in 3 x 16 = 48."""
    (line,) = Loader(rows([4, 10, 6]), 3, padding=Padding(8)).report(8, "auto")
    assert line.endswith("multiples of 8 tokens (pad_to_multiple_of=8); 58.3% of the tokens are padding")


def padded_batch(kind: str, width: int) -> Batch:
    draw, of_class = np.random.default_rng(0), kind == "encoder"
    ids = [draw.integers(*((4, 20) if of_class else (5, 200)), n).tolist() for n in (5, 11, 9)]
    if of_class:
        samples = [Sample(row, [-100] * len(row), None, [0] * len(row), i % 2) for i, row in enumerate(ids)]
        return collate(samples, 1, width)
    batch = collate([Sample(row, [-100, -100, *row[2:]]) for row in ids], 0, width)
    more = {"question": torch.tensor([0, 0, 0]), "answer": torch.tensor([0, 1, 0])}
    return batch | (more if kind == "candidates" else {})


@pytest.mark.parametrize("kind", ["tokens", "candidates", "encoder"])
def test_padding_changes_neither_loss_nor_gradient(kind: str, tiny_model: Path, tmp_path: Path) -> None:
    """A decoder by tokens and by candidates, an encoder by labels: loss and every gradient agree to rounding in fp32.

    Products of another width add up in another order: 2^-24 for each of 32 positions.
    """
    how = {"head": "classification", "num_labels": 2} if kind == "encoder" else {}
    source = save_encoder("bert", tmp_path / "bert") if kind == "encoder" else tiny_model
    found = []
    for width in (1, 32):
        model = keyhole.load(source, dtype="float32", device="cpu", **how)
        before = {name: p.detach().clone().double() for name, p in model.module.named_parameters()}
        opt = keyhole.LOMO(model, lr=1.0, weight_decay=0.0, model_dropout=False)
        loss = float(opt.step(padded_batch(kind, width)))
        opt.flush()
        moved = {name: before[name] - p.detach().double() for name, p in model.module.named_parameters()}
        found.append((loss, moved))
        model.close()
    (loss, grads), (padded_loss, padded_grads) = found
    assert abs(loss - padded_loss) < 1e-6 * max(1, abs(loss))
    assert max(float(grad.abs().max()) for grad in grads.values()) > 1e-3
    for name, grad in grads.items():
        scale = max(1.0, float(grad.abs().max()))
        assert float((grad - padded_grads[name]).abs().max()) < 2e-6 * scale, name
