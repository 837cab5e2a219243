"""The main claim in the demo: a run in a budget smaller than the model is the run without one, to the bit."""

from dataclasses import replace

import pytest

from keyhole.demo import run
from keyhole.demo.report import Squeezed, make_report, squeezed_line
from keyhole.demo.run import SHARE, one_of_each_sweep, squeeze
from keyhole.methods import METHODS
from tests.demo.test_report import ENVIRONMENT


@pytest.mark.parametrize("name", one_of_each_sweep(list(METHODS)))
def test_the_same_bits_in_less_than_the_model(name: str) -> None:
    """Everything is planned within the budget, most weights cross, and nothing differs."""
    found = squeeze(name, steps=1, device="cpu")
    assert not found.skipped
    assert found.budget_bytes == int(SHARE * found.weights_bytes) < found.weights_bytes
    assert found.same_losses and found.same_weights and len(found.losses) == 1
    assert found.up_bytes > found.weights_bytes / 2 and found.down_bytes > 0


def test_another_run_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with other noise, or another order of the data, it does."""
    real, seeds = run._train_deeper, iter((0, 1))
    monkeypatch.setattr(run, "_train_deeper", lambda name, seed, *how: real(name, next(seeds), *how))
    found = squeeze(one_of_each_sweep(list(METHODS))[-1], steps=1, device="cpu")
    assert not found.same_losses and not found.same_weights
    assert "NOT the same" in squeezed_line(found) and "NOT the same" in make_report([], 0, ENVIRONMENT, [found])


def test_what_is_said() -> None:
    """Sizes, the verdict, what crossed; or the reason why not."""
    good = Squeezed("zo", "", 10 * 2**20, 5 * 2**20, 3 * 2**20, 2**20, [1.0] * 3, True, True)
    said = squeezed_line(good)
    assert said.startswith("zo in 5.0 MiB, a model of 10.0 MiB: losses and weights are the same bits")
    assert said.endswith("3.0 MiB crossed the link up, 1.0 MiB down in 3 steps")
    assert "skipped: no <room>" in squeezed_line(replace(good, skipped="no <room>"))
    page = make_report([], 0, ENVIRONMENT, [good, replace(good, skipped="no <room>")])
    assert "no &lt;room&gt;" in page and "are the same bits" in page
