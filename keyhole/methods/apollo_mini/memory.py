"""The cost of a step of apollo-mini: LOMO's, and the moments of what is no matrix of a block (lomo/adam_pages.py).

Host memory, and up and down the link per step: two numbers per parameter of embedding, head, vectors and others, 2
bytes each if the model computes in 16 bits, else 4. On the device two pages of them, the largest of which is a chunk of
a table; and 8 bytes per number of the longer side of a matrix.
"""

from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB
from keyhole.methods.lomo.adam_pages import device_state, page_numels
from keyhole.methods.lomo.memory import step_work as lomo_work
from keyhole.methods.settings import MethodSettings
from keyhole.methods.states import FORMATS, Format
from keyhole.methods.work import reverse_bytes
from keyhole.methods.workload import Formulas, Room, StepWork, Workload
from keyhole.model.backward.memory import ReverseBytes
from keyhole.model.structure.layout import Layout

SLOTS = 2  # a page that is in use, and the next one


def format_of(element_bytes: int) -> Format:
    """Of the moments, if the model computes in numbers of so many bytes."""
    return FORMATS["float32" if element_bytes == 4 else "bfloat16"]


def host_state(
    layout: Layout,
    streamed: set[int],
    element_bytes: int,
    own: MethodSettings | None = None,
    cut: dict[int, tuple[int, int]] | None = None,
) -> tuple[str, int]:
    """What is kept in host memory, in words and bytes. Every rank has all of it."""
    state = int(format_of(element_bytes).bytes * sum(page_numels(layout, ()).values()))
    return f"apollo-mini keeps {state / GIB:.1f} GiB of moments of embedding and head", state


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ReverseBytes:
    """The device peak of a step."""
    state = device_state(page_numels(layout, ()), format_of(room.formats.dtype.itemsize), SLOTS)
    sides = sum(t.shape.numel() // min(t.shape[-2:]) for t in layout.tensors if t.in_matrices)
    return reverse_bytes(layout, streamed, work, room, updates=state + 8 * sides)


def step_work(layout: Layout, streamed: set[int], work: Workload, room: Room, rates: Rates) -> StepWork:
    """The FLOPs, bytes and launches of a step."""
    (_, state), found = (
        host_state(layout, streamed, room.formats.dtype.itemsize),
        lomo_work(layout, streamed, work, room, rates),
    )
    return found.plus(touched=2 * state, up=state, down=state, host_bytes=state, saved_bytes=state)


FORMULAS = Formulas(device_bytes, step_work, host_state)
