"""Losses that a config asks Transformers to add to the cross-entropy of the tokens, and that are not computed here.

    loss = cross-entropy + router_aux_loss_coef * balance of the routers       where output_router_logits is true
    loss = cross-entropy + z_loss_coefficient * mean(logsumexp(logits)^2)

A config that contains them asks for training with them. A run without them would train another loss, so training is
refused until the config turns them off.
"""

from collections.abc import Iterator
from typing import Any

from keyhole.errors import UserError

OF_ROUTERS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
ALWAYS = ("z_loss_coefficient",)


def check_loss(config: Any) -> None:
    """UserError if the config asks for a loss beside the cross-entropy of the tokens."""
    configs = list(_configs(config))
    with_routers = any(getattr(one, "output_router_logits", False) for one in configs)
    for key in (*ALWAYS, *(OF_ROUTERS if with_routers else ())):
        coefficient = next((value for one in configs if (value := getattr(one, key, None))), 0)
        if coefficient:
            off = f'"{key}": 0.0' + (' or "output_router_logits": false' if key in OF_ROUTERS else "")
            raise UserError(
                f"model: {key} is {coefficient:g} in its config"
                + (" and output_router_logits is true" if key in OF_ROUTERS else "")
                + ": Transformers would add that loss to the one of the tokens, keyhole would not. Write "
                f"{off} into config.json to train without it"
            )


def _configs(config: Any) -> Iterator[Any]:
    """The config, and those inside it."""
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        if (inside := getattr(config, name, None)) is not None and not isinstance(inside, dict):
            yield from _configs(inside)
