"""A unit cut into spans that an update treats alike: trained or frozen, with or without weight decay."""

from dataclasses import dataclass, replace

from keyhole.model.structure.layout import Unit


@dataclass
class Span:
    """[begin, end) of a unit."""

    begin: int
    end: int
    trained: bool = True
    decays: bool = True


def cut_unit(unit: Unit, spared: frozenset[int] = frozenset()) -> list[Span]:
    """The spans of a unit; spared: ids of the parameters that do not decay. Padding between aligned tensors is in no
    span: it stays 0, as after loading, and is not part of a checkpoint."""
    spans: list[Span] = []
    for tensor in unit.tensors:
        begin, end = max(0, tensor.start - unit.start), min(unit.numel, tensor.stop - unit.start)
        span = Span(begin, end, tensor.param.requires_grad, id(tensor.param) not in spared)
        if spans and replace(span, begin=spans[-1].begin, end=begin) == spans[-1]:
            spans[-1].end = end
        else:
            spans.append(span)
    return spans
