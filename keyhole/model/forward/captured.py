"""While a step of forward passes is captured as a CUDA graph: a stream per look, and the masks of the eager passes.

The kernels of a short batch occupy a part of the GPU, and each waits for the one before. The passes of different looks
do not depend on each other. While a step is captured as a CUDA graph (methods/zo/recorded_step.py), each look is
therefore launched on a stream of its own:

    conductor    perturb unit u --+-------------------+-- perturb unit u + 1 --+-- ..
    stream 0                      +-- passes with + --+                        +-- ..
    stream 1                      +-- passes with - --+                        +-- ..

A unit's copies are written before the fork and overwritten after the join; pairs of looks run one after the other.
Memory that is freed is reused by the stream in which it was allocated: what a look allocates, it uses on its own
stream.

Where no token is hidden, Transformers gives blocks no mask, and attention is told to be causal. While a CUDA graph is
captured, some versions make a mask nevertheless (5.17: always; 5.23: if the batch has one, whose numbers cannot be read
then). Attention converts that mask in every block (three small kernels), adds it to all scores, and may use another
kernel, with other bits: then the recording is not used at all.

    OPT-13B, 32 rows of 64 tokens: attention 57 us per block instead of 40, and 6 us for the mask

`noted` runs around the eager step and notes which blocks got no mask, by the shape of their input. `left_out` runs
around the capture, and removes the masks of exactly these. That holds for later batches too, if a batch consists of
token ids and nothing else: then the mask depends on shapes, which are the same in all steps that one graph serves. With
an `attention_mask` or `position_ids` in a batch (`is_plain`) the model's own mask stays.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from keyhole.machine.gpu import accelerator
from keyhole.model.batch import DeviceBatch

NAME = "attention_mask"
Call = tuple[int, torch.Size | None]  # a block's id, and the shape of its input


class Branches:
    """A stream for each look of a pair; without a device everything stays on the current stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.streams = [] if device is None else [accelerator.Stream(device) for _ in range(2)]
        self.forked: list[accelerator.Stream] = []

    def of_passes(self, looks: list[list[range]]) -> dict[int, accelerator.Stream]:
        """The stream of each pass. looks: of each pair, the passes of its looks."""
        sides = [each for by_look in looks for each in zip(self.streams, by_look, strict=False)]
        return {index: stream for stream, passes in sides for index in passes}

    def fork(self, side: int) -> None:
        """What this look launches from now on follows everything that the current stream was given."""
        if self.streams:
            stream = self.streams[side]
            stream.wait_stream(accelerator.current_stream(stream.device))
            self.forked.append(stream)

    def join(self) -> None:
        """What the current stream is given from now on follows everything that was launched since the forks."""
        for stream in self.forked:
            accelerator.current_stream(stream.device).wait_stream(stream)
        self.forked.clear()


def is_plain(batches: Iterable[DeviceBatch]) -> bool:
    """Whether these batches are token ids only."""
    return all(batch.inputs.keys() == {"input_ids"} for batch in batches)


@contextmanager
def noted(blocks: Iterable[nn.Module]) -> Iterator[set[Call]]:
    """The calls in which a block gets no mask; complete after the context."""
    without: set[Call] = set()
    masked: set[Call] = set()

    def note(block: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        (without if kwargs.get(NAME, masked) is None else masked).add(_call(block, args))

    with _hooked(blocks, note):
        yield without
    without -= masked


@contextmanager
def left_out(blocks: Iterable[nn.Module], without: set[Call]) -> Iterator[None]:
    """Removes the masks of these calls."""

    def remove(block: nn.Module, args: tuple, kwargs: dict[str, object]) -> tuple[tuple, dict[str, object]] | None:
        has_one = kwargs.get(NAME) is not None and _call(block, args) in without
        return (args, kwargs | {NAME: None}) if has_one else None

    with _hooked(blocks, remove):
        yield


@contextmanager
def _hooked(blocks: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    with ExitStack() as handles:
        for block in blocks:
            handles.enter_context(block.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def _call(block: nn.Module, args: tuple) -> Call:
    return id(block), args[0].shape if args else None
