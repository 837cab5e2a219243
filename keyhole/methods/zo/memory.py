"""Bytes on the device of a zeroth-order step: those of its forward passes (model/forward/memory.py), with the perturbed
copies of the spine for every pair of looks.

    mezo, meazo    2 q passes on all rows               q pairs          all hidden states wait: 2 q m
    fzoo           q + 1 passes on all rows             q // 2 + 1       (q + 1) m
    grzo           2 q passes on a q-th of the rows     q pairs          2 m, as of one direction; threads for 2 q m
    a search       3 passes on all rows, in halves      2 pairs          3 m; threads for 6 m

for m micro-batches; a unit's own copies are two, whatever the estimator: pairs are made one after the other.
"""

from dataclasses import replace

from keyhole.methods.base import Room, Workload
from keyhole.methods.memory import forward_bytes
from keyhole.methods.zo.defaults import DEFAULTS
from keyhole.methods.zo.traits import ZOConfig, directions
from keyhole.model.forward.memory import ForwardBytes
from keyhole.model.structure.layout import Layout


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ForwardBytes:
    """The device peak of a step."""
    own: ZOConfig = work.settings or ZOConfig()
    usual, q = DEFAULTS[own.estimator], directions(own)
    pairs = max(usual.pairs(q), 2 if work.searches else 0)
    planned = forward_bytes(layout, streamed, work, room, pairs)
    if not usual.splits:
        return planned
    at_once = replace(work, passes=work.passes if work.searches else 2 * work.passes // usual.passes(q))
    return replace(forward_bytes(layout, streamed, at_once, room, pairs), workspace=planned.workspace)
