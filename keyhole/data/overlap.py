"""How many samples of the held-out data are training samples too, by their tokens.

A loss on samples that were trained on says nothing about others, and the run that selects its best step by it selects
the most memorised one. Tasks count the same among their questions (tasks/draw.py).

Only training samples of a length that the held-out data have are compared: by a hash of 8 bytes, which costs about a
microsecond per sample. Of very large training data the first MOST such samples are compared.
"""

import numpy as np

from keyhole.data.dataset import Dataset

MOST = 2**21


def overlap_line(train: Dataset, held_out: Dataset) -> list[str]:
    """A warning for the report, or nothing."""
    theirs = [hash(_tokens(held_out, i)) for i in range(len(held_out.lengths))]
    alike = np.flatnonzero(np.isin(np.array(train.lengths), np.array(held_out.lengths)))
    ours = {hash(_tokens(train, i)) for i in alike[:MOST].tolist()}
    count = sum(each in ours for each in theirs)
    if not count:
        return []
    return [f"warning: {count:,} of the {len(theirs):,} samples are also in train_data: their loss is that of training"]


def _tokens(data: Dataset, index: int) -> bytes:
    return data.ids[data.starts[index] : data.starts[index + 1]].tobytes()
