"""Packs samples into rows of a fixed length: the longest first, each into the fullest row where it still fits.

Best fit decreasing needs never more than 11/9 of the fewest rows, plus one. The result depends on the lengths alone, so
it is the same in every run. No sample is cut. Samples of a row must not attend to each other: apart.py.
"""

from bisect import bisect_left, insort


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
