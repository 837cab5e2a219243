"""Bytes on the device of a zeroth-order step: those of its forward passes (model/forward/memory.py), with the perturbed
copies of the spine for every direction."""

from keyhole.methods.base import Room, Workload
from keyhole.methods.memory import forward_bytes
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.forward.memory import ForwardBytes
from keyhole.model.structure.layout import Layout


def device_bytes(layout: Layout, streamed: set[int], work: Workload, room: Room) -> ForwardBytes:
    """The device peak of a step."""
    own: ZOConfig = work.settings or ZOConfig()
    return forward_bytes(layout, streamed, work, room, own.directions)
