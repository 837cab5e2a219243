"""A hook inside of a pass cannot use the model for another one: refused, and the model works afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from tests.model.decoders import batch, load
from tests.model.streaming import streamed

USES: dict[str, Callable[[Any], Callable[[dict[str, torch.Tensor]], Any]]] = {
    "zo": lambda model: keyhole.ZO(model, 1e-2, eps=1e-3).step,  # passes on threads of their own
    "lomo": lambda model: keyhole.LOMO(model, 1e-2).step,  # one pass, on the calling thread
    "nll": lambda model: model.nll,
    "generate": lambda model: lambda one: model.generate(one["input_ids"], max_new_tokens=2, do_sample=False),
}


@pytest.mark.parametrize("inner", ["nll", "lomo"])
@pytest.mark.parametrize("outer", USES)
def test_a_pass_within_a_pass_is_refused(outer: str, inner: str) -> None:
    model = streamed(load("llama"), slot_count=4)
    use, again = USES[outer](model), USES[inner](model)
    hook = model.module.model.layers[1].register_forward_pre_hook(lambda module, args: again(batch()))
    with pytest.raises(UserError, match="in the middle of a pass"):
        use(batch())
    hook.remove()
    use(batch())
    again(batch())
