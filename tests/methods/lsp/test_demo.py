"""LSP on the embedded model and task: as good as AdamW, with a seventh of its numbers in the optimizer."""

from keyhole.demo.train import settings_of, start, train
from keyhole.eval.scoring import score_task
from keyhole.eval.tasks import read_task


def test_within_a_point_of_adamw() -> None:
    """Sixty steps of the demo's settings, on held-out notes."""
    accuracy = {}
    for name in ("adamw", "lsp"):
        settings = settings_of(name, steps=60)
        model, method = start(name, settings, seed=0, device="cpu")
        train(model, method, settings, seed=0)
        accuracy[name] = score_task(model, read_task("demo")).accuracy
    low = [target for target in method.targets.values() if target.p is not None]
    assert sum(p.numel for p in low) < sum(p.tensor.shape.numel() for p in low) / 6
    assert accuracy["lsp"] >= accuracy["adamw"] - 0.01
