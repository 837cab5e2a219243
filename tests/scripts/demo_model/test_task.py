"""The task: its files are what the generator makes, and its splits are fair."""

from keyhole import assets
from scripts.demo_model.task import TEST_ROWS, TRAIN_ROWS, make_rows, read_rows, rows_as_jsonl


def test_files_are_remade_bit_for_bit() -> None:
    """The generator gives the shipped files, byte by byte."""
    train, test = make_rows()
    assert assets.TRAIN.read_bytes() == rows_as_jsonl(train).encode("ascii")
    assert assets.TEST.read_bytes() == rows_as_jsonl(test).encode("ascii")


def test_splits_do_not_overlap_and_are_balanced() -> None:
    """No prompt occurs twice, in one split or across both; half of each split is blue."""
    train, test = read_rows(assets.TRAIN), read_rows(assets.TEST)
    assert (len(train), len(test)) == (TRAIN_ROWS, TEST_ROWS)
    assert len({row["prompt"] for row in train + test}) == TRAIN_ROWS + TEST_ROWS
    for rows in (train, test):
        assert 2 * sum(row["label"] for row in rows) == len(rows)


def test_rows_are_consistent() -> None:
    """The completion is the candidate that the label names, and prompts end where a stamp is due."""
    for row in read_rows(assets.TRAIN) + read_rows(assets.TEST):
        assert row["completion"] == row["candidates"][row["label"]]
        assert row["prompt"].endswith("\nStamp:")


def test_another_seed_makes_another_task() -> None:
    """The seed matters."""
    assert make_rows(1)[0] != make_rows(2)[0]


def test_no_word_gives_the_answer_away() -> None:
    """The best single-word rule, chosen on the training notes, is far from solving the held-out ones."""
    train, test = make_rows()
    words = [(set(row["prompt"].lower().replace(".", " ").replace(",", " ").split()), row["label"]) for row in train]
    vocabulary = set().union(*(found for found, _ in words))
    rules = {w: [sum((w in found) == (label == side) for found, label in words) for side in (0, 1)] for w in vocabulary}
    best = max(rules, key=lambda w: max(rules[w]))
    side = int(rules[best][1] > rules[best][0])
    right = sum((best in row["prompt"].lower()) == (row["label"] == side) for row in test)
    assert right / len(test) < 0.65
