"""Lines for the start block about how experts are moved."""

from keyhole.machine.sizes import about
from keyhole.model.structure.experts import STACK_NUMEL
from keyhole.model.structure.layout import Layout


def expert_lines(layout: Layout, streamed: set[int], may_cut: bool, element_bytes: int) -> list[str]:
    """A line about layers that are computed expert by expert, and one about large stacks that are not."""
    lines = []
    if layout.experts:
        count = layout.experts[0].count
        how = f"experts: {len(layout.experts)} layers of {count} are computed one expert at a time, streamed or "
        how += "resident: the same bits in both, those of the grouped product within rounding"
        if any(unit.expert is not None and unit.index in streamed for unit in layout.units):
            how += "; only experts that tokens meet cross the link"
        elif streamed and not may_cut:
            how += "; they are moved as whole stacks, since this method, wire or number of ranks needs these"
        lines.append(how)
    whole = [
        t.shape.numel()
        for t in layout.tensors
        if t.block is not None and len(t.shape) == 3 and not t.experts and t.shape.numel() > STACK_NUMEL
    ]
    if whole and streamed:
        lines.append(
            f"experts: {len(whole)} stacks of up to {about(max(whole) * element_bytes)} are moved whole: this model "
            "does not compute them expert by expert"
        )
    return lines
