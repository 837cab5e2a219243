"""The collector is off within, and afterwards as it was, whatever happened."""

import gc

import pytest

from keyhole.machine.collector import no_collector


@pytest.mark.parametrize("was_on", [True, False])
def test_it_is_put_back(was_on: bool) -> None:
    """Also when it was off before, and when an import fails."""
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ImportError), no_collector():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
