"""keyhole: full-parameter fine-tuning of language models that do not fit your GPU.

    model = keyhole.load("path-or-hub-id", placement="stream", gpu_memory="8GiB", dtype="bfloat16")
    opt = keyhole.ZO(model, lr=1e-7, eps=1e-3)
    for batch in loader:
        loss = opt.step(batch)
    opt.flush()
    model.save_pretrained("out")

The packages in layers, from the bottom up; a file imports only from its own layer and those listed before it
(tests/test_layers.py). Each package begins with a list of its files; CONTRIBUTING.md says where a change goes.

    errors, weak, assets, machine, limits, pages, disk, ranks      this computer, files, processes
    ops, offload                   kernels beside their references; memory between host and GPU
    model, methods                 a decoder in flat memory, forward and backward; a folder per update rule
    config, plan, loading          every setting of a run; what fits and how fast; `keyhole.load`
    data, checkpoint               from files to batches, tasks; checkpoints and the journal of `zo`
    eval, harness, report, hub     scores and chat; lm-evaluation-harness; pages about runs; publishing
    training                       the loop that all methods share, and everything around it
    bench, demo, compare, cli, hf  programs; the command line; Hugging Face's Trainer
"""

from typing import Any

from keyhole.methods import CLASSES
from keyhole.methods.traits import imported

__version__ = "0.2.0"

_WHERE = {
    "Workload": "keyhole.methods.workload:Workload",
    "load": "keyhole.loading:load",
    "Model": "keyhole.model.model:Model",
}
_WHERE |= {name: row.cls for name, row in CLASSES.items()}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Imports on first use, so that the command line starts without PyTorch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    found = imported(_WHERE[name])
    if name in CLASSES:
        from keyhole.config.docs import constructor

        found.__doc__ = found.__doc__.partition("\n\nSettings")[0] + constructor(CLASSES[name])
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
