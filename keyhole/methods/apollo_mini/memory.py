"""The cost of a step of apollo-mini: LOMO's, and the moments of what is no matrix of a block (lomo/adam_pages.py).

Host memory, and up and down the link per step: two numbers per parameter of embedding, head, vectors and others, 2
bytes each if the model computes in 16 bits, else 4. On the device two pages of them, the largest of which is a chunk of
a table; and 8 bytes per number of the longer side of a matrix.
"""

from keyhole.machine.rates import Rates
from keyhole.methods.apollo_mini.traits import APOLLO_MINI
from keyhole.methods.lomo.adam_pages import Paging
from keyhole.methods.lomo.memory import step_work as lomo_work
from keyhole.methods.work import reverse_bytes
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout

PAGING = Paging(APOLLO_MINI.name, APOLLO_MINI.settings, (), lambda layout: 2)  # the page in use, and the next one


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step."""
    sketches = sum(8 * t.shape.numel() // min(t.shape[-2:]) for t in layout.tensors if t.in_matrices)
    return reverse_bytes(layout, streamed, work, room, updates=PAGING.on_device(layout, work, room) + sketches)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    return lomo_work(layout, streamed, work, room, rates).plus(**PAGING.work(layout, work, room))


FORMULAS = Formulas(device_bytes, step_work, PAGING.host_state)
