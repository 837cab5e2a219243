"""Samples are gathered in the memory that they keep."""

import tracemalloc

import numpy as np

from keyhole.data.collect import Collector
from keyhole.data.examples import Example
from keyhole.data.opened import Record
from keyhole.data.settings import DataSettings
from keyhole.data.tokens import Tokens


def test_the_peak_is_little_more_than_what_stays() -> None:
    """Five bytes per token stay; at no time are there seven, not even when the data set is made."""
    count, length = 500, 4000
    example = Example(Record("a.jsonl", "line", 1, {}), prompt="", answer="")
    tokens = Tokens(np.arange(length, dtype=np.int32), np.ones(length, dtype=bool), None, False)
    tracemalloc.start()
    try:
        collector = Collector(DataSettings(max_length=None), [])
        for _ in range(count):
            collector.add(example, tokens)
        data = collector.dataset(0, None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.ids) == count * length and peak < 7 * count * length
    assert data[499].labels[1:3] == [1, 2] and data.where[499] == "a.jsonl, line 1"
