"""Which rows a model may compute together (rows.py), tested on the model itself: once, when it first matters.

A config does not tell. Most decoders compute a position from the tokens before it alone, but not all that load as one:
CPM-Ant's attention sees the whole row, code from elsewhere may do what it likes, and a layer that mixes rows (batch
norm) needs no look ahead. And models differ in whether they look at the jumps of position_ids.

**Causal?** Without that no rows are shared or joined. The model runs on rows of random tokens x:

    as is      row t:  x_0 ... x_(t-1) x_t x_(t+1) ...          the NLL of x_t, from position t - 1
    after      row t:  x_0 ... x_(t-1) then other tokens        the same number, if nothing behind it matters
    before     row t:  with another x_(t-2)                     shows how large an effect is in this model

    |after - as is| <= LIMIT * |before - as is|                 (largest over the rows)

Both sides have the same shapes and kernels: the left is 0 for a dense decoder, at most rounding for mixtures of experts
(whose groups change), and for CPM-Ant about as large as the right. All rows of a kind are in one batch and differ, so
rows that see each other fail too. Padded rows, for which models have other code, are tested by themselves. What a few
short rows cannot show: routers that drop tokens of a full batch. No model of Transformers has one.

**Apart?** Without that no rows are joined, and packed batches are refused. Apart are Llama, Qwen, Gemma, Mistral, Phi,
OLMo, GPT-2 and most others; OPT, BLOOM, Falcon, MPT, GPT-OSS, recurrent layers, convolutions and BART leak. For each
token of a sample the NLL is computed of the sample alone, packed after another sample, and concatenated with it, the
latter two with two different samples before it:

    |packed - alone|   <= LIMIT * |joined - alone|              (largest over the tokens)
    |packed - packed'| <= ROUNDING * |joined - joined'|         ': with other tokens in the sample before

The concatenation shows how large an effect is in this model. Passes of other shapes round differently: the ratio of the
first line is 1e-5 or less in float32, and up to 0.02 in bfloat16. A leak can be smaller than LIMIT (Falcon-H1, LFM2:
0.0003 to 0.03), so the second line compares rows of one batch, whose halves change places in another: passes of the
same shapes, where what is left is 0 if samples are apart, and 0.0004 or more if they leak.

A test is one sweep with two or four short passes, and works with any weights: deferred updates are not applied before.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from keyhole.errors import UserError
from keyhole.model.batch import Batch, DeviceBatch, hides_tokens, to_device
from keyhole.model.rows import IGNORED, find_shared, is_on_host, longest_row
from keyhole.model.structure.config_files import setting

LIMIT, LIMIT_16_BIT, ROUNDING = 0.01, 0.1, 1e-4
LENGTH = 9  # tokens of a sample

Run = Callable[[list[DeviceBatch]], list[torch.Tensor]]
"""The NLL of each target, per batch, at the weights at home."""


class RowRules:
    """The results of the tests of one model. table_rows: of its embedding; tests: whether it may be tested for shared
    rows (a classifier has none; the sweep of a sharded model is one of all ranks, of which some may have no need)."""

    def __init__(
        self, module: Any, run: Run, table_rows: int, device: torch.device, dtype: torch.dtype, tests: bool
    ) -> None:
        self.config, self.name, self.run, self.device = module.config, type(module).__name__, run, device
        self.table_rows, self.tests = table_rows, tests
        self.limit = LIMIT if dtype in (torch.float32, torch.float64) else LIMIT_16_BIT
        self._is_causal: dict[bool, bool] = {}  # by whether rows are padded, if it was tested
        self._most_joined: int | None = None  # not tested yet
        self._keeps_packed_apart = False  # not tested yet

    def of(self, batches: list[Batch], shares: bool, joins: bool) -> tuple[bool, int]:
        """Whether candidates of these batches share rows, and the most tokens of a joined row (0: none are joined).
        shares, joins: what the caller asks for."""
        if not (shares or joins) or not self.tests:
            return False, 0
        for padded in {hides_tokens(one.get("attention_mask")) for one in batches if is_on_host(one)}:
            if padded not in self._is_causal and (joins or any(find_shared(one) is not None for one in batches)):
                self._is_causal[padded] = self.is_causal(padded)
        if not all(self._is_causal.values()):
            return False, 0
        if joins and self._most_joined is None:
            self._most_joined = longest_row(self.config) if self.keeps_apart() else 0
        return shares, (self._most_joined or 0) if joins else 0

    def check_packed(self, batches: list[Batch], sent: list[DeviceBatch]) -> None:
        """Tests the model, if the caller has packed these batches. (Those that were joined here were tested before.)"""
        packed = (one.packed and "position_ids" in batch for one, batch in zip(sent, batches, strict=True))
        if not self._keeps_packed_apart and any(packed):
            self.check_packing(max(one["input_ids"].shape[1] for one in batches))

    def check_packing(self, length: int | None = None) -> None:
        """UserError if samples packed into a row of `length` tokens would attend to each other; tested once."""
        chunk = setting(self.config.get_text_config(), "attention_chunk_size")
        if chunk and length and length > chunk:
            raise UserError(
                f"packing is not supported by {self.name} at max_length={length}: its attention is cut every "
                f"{chunk} tokens of the row, in the middle of packed samples; set max_length={chunk} or less, "
                "or packing=false"
            )
        if (leak := self.find_leak()) is not None:
            raise UserError(
                f"packing is not supported by {self.name}: packed samples see each other "
                f"(a difference of {leak[0]:.2g} nats where joining them makes {leak[1]:.2g}); set packing=false, "
                "or give every sample a row of its own"
            )
        self._keeps_packed_apart = True

    # -- the tests -----------------------------------------------------------------------------------------------------

    @property
    def _token_count(self) -> int:
        return min(int(self.config.get_text_config().vocab_size), self.table_rows)

    @torch.no_grad()
    def is_causal(self, padded: bool) -> bool:
        """Whether a position depends on the tokens of its row up to its own alone. padded: in rows with padding, and
        thus a mask. No if nothing is shown: no token has an effect on the next position, or the model cannot run."""
        generator, count = torch.Generator().manual_seed(0), self._token_count
        x_T, other_T = (torch.randint(0, count, (LENGTH,), generator=generator) for _ in range(2))
        other_T = torch.where(other_T == x_T, (x_T + 1) % count, other_T)
        columns_T, t_R = torch.arange(LENGTH), torch.arange(2, LENGTH)[:, None]
        after_RT = torch.where(columns_T >= t_R, other_T, x_T)
        before_RT = torch.where(columns_T == t_R - 2, other_T, x_T)
        labels = torch.where(columns_T == t_R, x_T, IGNORED).repeat(2, 1)
        batches = []
        for rows_RT in (x_T.expand_as(after_RT), after_RT):
            batch = {"input_ids": torch.cat([rows_RT, before_RT]), "labels": labels}
            batch |= {"attention_mask": torch.ones_like(labels)} if padded else {}
            padding = {"input_ids": int(x_T[0]), "labels": IGNORED, "attention_mask": 0}
            batches.append({name: F.pad(x, (0, 2 if padded else 0), value=padding[name]) for name, x in batch.items()})
        try:
            first, second = (x_N.double() for x_N in self.run([to_device(batch, self.device) for batch in batches]))
        except Exception:  # of the family's own code
            return False
        as_is, before = first.chunk(2)
        effect, leak = float((before - as_is).abs().max()), float((second - first).abs().max())
        return effect > 0 and leak <= self.limit * effect

    def keeps_apart(self) -> bool:
        """Whether packed samples do not attend to each other; no if the model cannot run on them."""
        try:
            return self.find_leak() is None
        except Exception:
            return False

    @torch.no_grad()
    def find_leak(self) -> tuple[float, float] | None:
        """(leak, effect of concatenation) in nats if packed samples see each other; None: they do not. Row r trains
        only on its token r + 1: one NLL per token. Alone a sample has the positions that the model gives it, which need
        not begin at 0."""
        t, rows, count = LENGTH, LENGTH - 1, self._token_count
        second = torch.randint(0, count, (t,), generator=torch.Generator().manual_seed(0))
        first = second.roll(t // 2)  # a trained model that sees it copies tokens from it: clear
        labels = torch.full((rows, 2 * t), IGNORED)
        labels[torch.arange(rows), torch.arange(t + 1, 2 * t)] = second[1:]
        one, other = (torch.cat([x, second]).repeat(rows, 1) for x in (first, (first + 1) % count))
        restart, onward = (x.repeat(2 * rows, 1) for x in (torch.arange(2 * t) % t, torch.arange(2 * t)))
        both = {"labels": labels.repeat(2, 1)}
        batches = [
            {"input_ids": one[:, t:].contiguous(), "labels": labels[:, t:].contiguous()},
            both | {"input_ids": torch.cat((one, other)), "position_ids": restart},
            both | {"input_ids": torch.cat((other, one)), "position_ids": restart},
            both | {"input_ids": torch.cat((one, other)), "position_ids": onward},
        ]
        found = [x_N.double().cpu() for x_N in self.run([to_device(batch, self.device) for batch in batches])]
        alone, packed, packed_2, joined, joined_2 = found[0], *found[1].chunk(2), *found[3].chunk(2)
        swapped_2, swapped = found[2].chunk(2)
        for effect, whole, limit in (
            (packed - alone, joined - alone, self.limit),
            (torch.cat([packed - swapped_2, packed_2 - swapped]), joined - joined_2, ROUNDING),
        ):
            leak, yardstick = float(effect.abs().max()), float(whole.abs().max())
            if not leak <= limit * yardstick + 1e-6:  # also if it is not a number
                return leak, yardstick
        return None
