"""Tests on the model itself: does a position depend on its own row up to its own token, and on nothing else?

Rows may share hidden states (shared_rows.py) only if that holds. Most decoders are made so, but not all that load as
one: CPM-Ant's attention sees the whole row, code from elsewhere may do what it likes, and a layer that mixes rows
(batch norm) needs no look ahead. A config does not tell. So the model runs on rows of random tokens x:

    as is      row t:  x_0 ... x_(t-1) x_t x_(t+1) ...          the NLL of x_t, from position t - 1
    after      row t:  x_0 ... x_(t-1) then other tokens        the same number, if nothing behind it matters
    before     row t:  with another x_(t-2)                     shows how large an effect is in this model

    |after - as is| <= LIMIT * |before - as is|                 (largest over the rows)

The two sides have the same shapes and so the same kernels: the left is 0 for a dense decoder in any dtype, and at most
rounding for mixtures of experts, whose groups change; for CPM-Ant it is about as large as the right. All rows of a kind
are in one batch and differ, so that rows that see each other fail too. Models have other code for padded rows, which
are tested by themselves. The answer is no if nothing is shown: no token has an effect on the next position, or the
model cannot run on such rows.

Rows may be joined (joined_rows.py) if samples of one row do not see each other as well: the test of apart.py.

What a few short rows cannot show: routers that drop tokens of a full batch. No model of Transformers has one.
Cost: one sweep, with two short passes. The test works with any weights, so deferred updates (zo) are not applied
before it.
"""

from typing import Any

import torch
from torch.nn import functional as F

from keyhole.model.batch import DeviceBatch, to_device
from keyhole.model.forward.evaluation import nll_by_token

LIMIT, LIMIT_16_BIT = 0.01, 0.1
LENGTH = 9  # tokens of a row


@torch.no_grad()
def is_causal(model: Any, padded: bool) -> bool:
    """Whether a position of this decoder depends on the tokens of its row up to its own alone. padded: in rows with
    padding, and thus a mask."""
    try:
        first, second = (x_N.double() for x_N in nll_by_token(model, _probes(model, padded)))
    except Exception:
        return False
    as_is, before = first.chunk(2)
    effect, leak = float((before - as_is).abs().max()), float((second - first).abs().max())
    limit = LIMIT if model.dtype in (torch.float32, torch.float64) else LIMIT_16_BIT
    return effect > 0 and leak <= limit * effect


def _probes(model: Any, padded: bool) -> list[DeviceBatch]:
    """Two batches: rows as they are, and rows that are changed after their trained token; in both also rows that are
    changed before it."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    count = min(config.vocab_size, model.layout.table.shape[0])
    generator = torch.Generator().manual_seed(0)
    x_T, other_T = (torch.randint(0, count, (LENGTH,), generator=generator) for _ in range(2))
    other_T = torch.where(other_T == x_T, (x_T + 1) % count, other_T)
    columns_T, t_R = torch.arange(LENGTH), torch.arange(2, LENGTH)[:, None]
    after_RT = torch.where(columns_T >= t_R, other_T, x_T)
    before_RT = torch.where(columns_T == t_R - 2, other_T, x_T)
    labels = torch.where(columns_T == t_R, x_T, -100).repeat(2, 1)
    found = []
    for rows_RT in (x_T.expand_as(after_RT), after_RT):
        batch = {"input_ids": torch.cat([rows_RT, before_RT]), "labels": labels}
        batch |= {"attention_mask": torch.ones_like(labels)} if padded else {}
        padding = {"input_ids": int(x_T[0]), "labels": -100, "attention_mask": 0}
        batch = {name: F.pad(x, (0, 2 if padded else 0), value=padding[name]) for name, x in batch.items()}
        found.append(to_device(batch, model.device))
    return found
