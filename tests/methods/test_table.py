"""The rows of the table of methods, and the settings that they name."""

from dataclasses import FrozenInstanceError, fields

import pytest

from keyhole.config.fields import RUN, own_settings
from keyhole.config.schema import TrainConfig
from keyhole.methods import METHODS
from keyhole.methods.settings import kinds
from keyhole.methods.traits import Traits


@pytest.mark.parametrize("row", METHODS.values(), ids=METHODS)
def test_a_row_s_settings_are_frozen_typed_and_fit_their_types(row: Traits) -> None:
    """Each default is a value that the setting may have; nothing can be changed afterwards."""
    own = row.settings()
    assert issubclass(row.load(), object) and row.load().row is row
    for each in fields(own):
        assert each.name in kinds(row.settings)
        with pytest.raises(FrozenInstanceError):
            setattr(own, each.name, None)


@pytest.mark.parametrize("row", METHODS.values(), ids=METHODS)
def test_a_config_without_values_gives_a_method_its_own_defaults(row: Traits) -> None:
    """Those of the run's settings are the same as those in Python."""
    config = TrainConfig(model="m", method=row.name, output_dir="o")
    assert own_settings(config) == row.settings()
    assert {"activations", "compile", "rounding", "seed", "weight_decay", "adam_beta1"} <= RUN
