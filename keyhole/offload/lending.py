"""Memory of one stream that other streams use.

PyTorch's allocator gives out memory by stream: what the compute stream frees, the compute stream gets again at once,
because its kernels run in order. Other streams are not part of that order. A buffer that copies use on another stream
can therefore be overwritten twice:

    at its start   kernels of the memory's previous owner are still queued on the compute stream,
                   and write into it after the first copy
    at its end     it is freed while a copy into it is still queued (a model is dropped while units are
                   uploaded), and the copy writes into the memory of its next owner
"""

from collections.abc import Iterable

import torch


def lend(buffer: torch.Tensor, streams: "Iterable[torch.cuda.Stream]") -> torch.Tensor:
    """Lends a new buffer of the current stream to other streams: they wait for what is queued now, and the allocator
    gives the memory to nobody else before they are done with it. Returns the buffer."""
    current = torch.cuda.current_stream(buffer.device)
    for stream in streams:
        stream.wait_stream(current)
        buffer.record_stream(stream)
    return buffer
