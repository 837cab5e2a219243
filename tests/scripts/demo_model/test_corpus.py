"""The corpus: the same everywhere, in plain ASCII, and without the task in it."""

import hashlib
import random
from collections import Counter

import pytest

from scripts.demo_model.corpus import FAR, KINDS, NEAR, about, documents, remark
from scripts.demo_model.task import make_rows
from scripts.demo_model.world import TOPICS

FIRST_2000 = "320786f1b71fd647"


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("ascii")).hexdigest()[:16]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The first texts of the seed that made the model."""
    return list(documents(7, 30_000))


def test_same_seed_same_texts_on_every_python(texts: list[str]) -> None:
    """The first texts of the seed that made the model hash to a stored value; another seed gives others."""
    assert digest(texts[:2000]) == FIRST_2000
    assert digest(list(documents(8, 2000))) != FIRST_2000


def test_count_only_cuts() -> None:
    """A longer corpus begins with the shorter one."""
    assert list(documents(3, 50)) == list(documents(3, 200))[:50]


def test_every_kind_appears(texts: list[str]) -> None:
    """A text that only one kind can write is found for each kind."""
    joined = "\n".join(texts[:2000])
    marks = {"story": " went to ", "letter": "Dear ", "card": "\nFriends: ", "fact": " works with "}
    marks |= {"season": "Then came ", "chat": "<|assistant|>"}
    assert {kind.__name__ for kind in KINDS} == marks.keys()
    assert all(mark in joined for mark in marks.values())


def test_stamps_follow_from_nothing(texts: list[str]) -> None:
    """On cards that also tell the mood, blue is as common among the pleased as among the others."""
    cards = [text for text in texts if "\nStamp: " in text and "\nReturn: " in text]
    share = {
        answer: sum("Stamp: blue" in c for c in cards if f"Return: {answer}" in c)
        / sum(f"Return: {answer}" in c for c in cards)
        for answer in ("yes", "no")
    }
    assert len(cards) > 1000
    assert share["yes"] == pytest.approx(2 / 3, abs=0.05) and share["no"] == pytest.approx(2 / 3, abs=0.05)


def test_topics_share_no_thing_and_no_sign() -> None:
    """So a clause tells its topic, and NEAR and FAR pairs of topics cannot give the same text."""
    clauses = Counter(text for t in TOPICS for text in (*t.things, *t.good_signs, *t.bad_signs))
    assert max(clauses.values()) == 1
    assert not set(NEAR) & set(FAR) and len(TOPICS) == 1 + len(NEAR) + len(FAR)


def test_adjectives_of_a_topic_take_one_side() -> None:
    """No adjective both praises and blames the same topic."""
    assert all(not set(topic.good) & set(topic.bad) for topic in TOPICS)


def test_no_note_of_the_task_is_in_the_corpus(texts: list[str]) -> None:
    """Not one of the 1400 notes occurs in the first 10,000 texts (nor can it in later ones: NEAR and FAR)."""
    corpus = "\n".join(texts[:10_000])
    notes = [row["prompt"].removesuffix("\nStamp:") for rows in make_rows() for row in rows]
    assert not [note for note in notes if note in corpus]


@pytest.mark.parametrize("pleased", [True, False])
def test_clauses_agree_with_the_hidden_bit(pleased: bool) -> None:
    """A clause uses adjectives of its side, or negates one of the other side."""
    rng = random.Random(1)
    for _ in range(300):
        for topic in TOPICS:
            clause = about(rng, topic, pleased, topic.things[0])
            negated = " not " in clause or " never " in clause
            side = topic.adjectives(pleased != negated)
            assert any(clause.endswith(word) for word in side), clause


def test_remarks_join_two_topics() -> None:
    """Every remark tells of things or signs of exactly two topics, or one thing of each side of a "but"."""
    rng = random.Random(2)
    for _ in range(300):
        text = remark(rng, True, FAR).lower()
        found = [t for t in TOPICS if any(f"the {thing} was" in text for thing in t.things)]
        signs = [t for t in TOPICS if any(sign.lower() in text for sign in t.good_signs + t.bad_signs)]
        assert len({t.name for t in found + signs}) == 2, text
