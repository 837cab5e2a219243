"""zo on two and four ranks, which are threads here, has the bits of one process: twelve families, tied and with experts
among them."""

import pytest
import torch

from keyhole.methods.zo.traits import DEFAULTS
from keyhole.ranks import Ranks
from tests.matrix import in_every_run
from tests.model.decoders import TWELVE
from tests.ranks.threads import together
from tests.ranks.workers import zo_results

ESTIMATORS = {name: {"estimator": name, "directions": min(2, DEFAULTS[name].directions)} for name in DEFAULTS}


@in_every_run(lambda name: name in ("opt", "qwen2", "mixtral"))
@pytest.mark.parametrize("name", TWELVE)
def test_ranks_have_the_bits_of_one_process(name: str) -> None:
    """Five micro-batches of different sizes, streamed: losses and weights of all ranks are those of one process with
    resident weights; of every estimator, too."""
    for size, settings in zip((2, 4, 2), [{}, *ESTIMATORS.values()] if name == "opt" else [{}], strict=False):
        alone = zo_results(Ranks(), name, **settings)
        for ours in together(size, lambda ranks, settings=settings: zo_results(ranks, name, **settings)):
            assert not [key for key in alone if not torch.equal(ours[key], alone[key])], (size, settings)
