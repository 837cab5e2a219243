"""The collector is off within, and afterwards as it was, whatever happened; what imports made is left alone."""

import gc
import sys
from types import ModuleType

import pytest

from keyhole.machine import collector
from keyhole.machine.collector import imports, no_collector


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


@pytest.mark.parametrize("freeze", [True, False])
def test_what_the_first_imports_made_is_frozen(monkeypatch: pytest.MonkeyPatch, freeze: bool) -> None:
    """Once, in a process of keyhole's own; what is made later is collected as ever."""
    monkeypatch.setattr(collector, "HEAVY", "heavy")
    before = gc.get_freeze_count()
    try:
        with imports(freeze):
            monkeypatch.setitem(sys.modules, "heavy", ModuleType("heavy"))
        frozen = gc.get_freeze_count() - before
        assert frozen > 0 if freeze else frozen == 0
        with imports(freeze):
            made = [[] for _ in range(1000)]
        assert gc.get_freeze_count() - before == frozen and any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
