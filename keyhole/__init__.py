"""keyhole: full-parameter fine-tuning of language models that do not fit your GPU.

    model = keyhole.load("path-or-hub-id", placement="stream", gpu_memory="8GiB", dtype="bfloat16")
    opt = keyhole.ZO(model, lr=1e-7, eps=1e-3)
    for batch in loader:
        loss = opt.step(batch)
    opt.flush()
    model.save_pretrained("out")

The packages in layers, from the bottom up; a file imports only from its own layer and those listed before it
(tests/test_layers.py). Each package begins with a list of its files.

    errors, limits, weak   mistakes that the user can fix; bounds of numbers; callbacks that keep no owner alive
    assets                 the embedded model and task
    machine                memory, cores, GPU, link, measured rates
    pages                  what all HTML pages share
    disk                   durable files, weight files in published formats
    ranks                  several processes that train one model
    ops                    kernels, each beside its PyTorch reference
    offload                moves pages between host memory and GPU; knows nothing of training
    model                  a Hugging Face decoder in flat memory: structure, weights, forward and backward passes
    methods                a folder per update rule: settings, step, bytes, FLOPs
    plan                   which units stay on the GPU; bytes and seconds of a step
    loading                `keyhole.load`
    data                   from files to batches; tasks
    checkpoint             checkpoints, and the journal of a zeroth-order run
    eval, harness          scores, answers and chat; lm-evaluation-harness
    config                 every setting of a run
    hub                    publishes models
    report                 pages about runs
    training               the loop that all methods share, and everything around it
    bench, demo, compare   programs: measurements, the demo, tables of many runs
    cli                    the command line: one file per verb
    hf                     Hugging Face's Trainer with keyhole's methods
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
    return imported(_WHERE[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
