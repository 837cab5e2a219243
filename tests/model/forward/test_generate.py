"""Generation brings units in one by one, and says what went wrong."""

import pytest

from tests.model.decoders import batch, load
from tests.model.streaming import streamed
from tests.model.test_model import Recording


@pytest.mark.parametrize("kind", ["common", "block", "head"])
def test_the_error_of_a_unit_that_cannot_be_brought_in_is_seen(kind: str) -> None:
    """Whatever the engine says, not that a unit which never came cannot be released; and the next call works."""
    resident = load()
    model, ids = streamed(resident), batch()["input_ids"]
    refused = model.layout.of_kind(kind)[-1].index
    model.engine.gate = Recording(model, refused)
    with pytest.raises(RuntimeError, match="the worker failed"):
        model.generate(ids, max_new_tokens=2)
    model.engine.gate = None
    assert not model.engine.held and model.conductor is None and "forward" not in model.head.linear.__dict__
    tokens = [m.generate(ids, max_new_tokens=4, do_sample=False).tolist() for m in (resident, model)]
    assert tokens[0] == tokens[1]
