"""Which rows a model may compute together, instead of each by itself.

    shared    candidates that differ in their last token are one row (shared_rows.py)
    joined    short rows are put behind each other in one row (joined_rows.py)
    packed    the caller has packed samples into rows (packing.py)

All three are exact only for models that compute a position from the tokens before it alone (causality.py), and keep
samples of one row apart (apart.py). That cannot be read from a config, so it is tested on the model itself, with a few
rows: once, when rows first could be computed together.
"""

import weakref
from typing import TYPE_CHECKING

from keyhole.model.apart import check_packing, keeps_apart
from keyhole.model.batch import Batch, DeviceBatch, hides_tokens
from keyhole.model.causality import is_causal
from keyhole.model.joined_rows import longest_row
from keyhole.model.shared_rows import find_shared, is_on_host

if TYPE_CHECKING:
    from keyhole.model.model import Model


class RowRules:
    """The results of the tests of one model."""

    def __init__(self, model: "Model") -> None:
        self.model: Model = weakref.proxy(model)  # which holds this object
        self._is_causal: dict[bool, bool] = {}  # by whether rows are padded, if it was tested
        self._most_joined: int | None = None  # not tested yet
        self._keeps_packed_apart = False  # not tested yet

    def of(self, batches: list[Batch], shares: bool, joins: bool) -> tuple[bool, int]:
        """Whether candidates of these batches share rows, and the most tokens of a joined row (0: none are joined).
        shares, joins: what the caller asks for."""
        if not (shares or joins) or not self._may_share(batches, joins):
            return False, 0
        return shares, self._longest_joined() if joins else 0

    def _may_share(self, batches: list[Batch], joins: bool) -> bool:
        """Whether a position depends on the tokens before it alone; tested without padding and with it. False if the
        model is sharded: the test visits units, and ranks whose rows do not share would not take part."""
        if self.model.classifies or self.model.sharded:
            return False
        for padded in {hides_tokens(one.get("attention_mask")) for one in batches if is_on_host(one)}:
            if padded not in self._is_causal and (joins or any(find_shared(one) is not None for one in batches)):
                self._is_causal[padded] = is_causal(self.model, padded)
        return all(self._is_causal.values())

    def _longest_joined(self) -> int:
        """The most tokens of a joined row; 0 if joined rows would see each other, or the model cannot run on them."""
        if self._most_joined is None:
            self._most_joined = longest_row(self.model.config) if keeps_apart(self.model) else 0
        return self._most_joined

    def check_packed(self, batches: list[Batch], sent: list[DeviceBatch]) -> None:
        """Tests the model, if the caller has packed these batches. (Those that were joined here were tested before.)"""
        packed = (one.packed and "position_ids" in batch for one, batch in zip(sent, batches, strict=True))
        if not self._keeps_packed_apart and any(packed):
            self.check_packing(max(one["input_ids"].shape[1] for one in batches))

    def check_packing(self, length: int | None) -> None:
        """UserError if samples packed into a row of `length` tokens would attend to each other."""
        check_packing(self.model, length)
        self._keeps_packed_apart = True
