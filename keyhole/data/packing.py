"""Packs several samples into one row; samples do not attend to each other.

Padding wastes the difference to the longest sample of a batch. Packing fills rows of max_length tokens with whole
samples instead: the longest first, each into the fullest row where it still fits (best fit decreasing; never more than
11/9 of the fewest rows, plus one). It depends on the lengths alone, so it is the same in every run. No sample is cut.

With plain concatenation a sample would attend to the one before it. model/packing.py keeps samples apart, and checks
that the model supports this.
"""

from bisect import bisect_left, insort

from keyhole.model.packing import check_packing

__all__ = ["check_packing", "pack"]


def pack(lengths: list[int], max_length: int) -> list[list[int]]:
    """Rows of sample indices, each of at most max_length tokens; every sample is in exactly one."""
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free tokens -> rows with exactly this much room
    spaces: list[int] = []  # its keys, sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_length, "samples are cut or dropped before they are packed"
        at = bisect_left(spaces, lengths[i])
        if at == len(spaces):
            row, space = len(rows), max_length
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(i)
        left = space - lengths[i]
        if left and left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        if left:
            by_space[left].append(row)
    return rows
