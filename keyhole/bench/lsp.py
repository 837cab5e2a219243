"""`keyhole bench lsp`: the trials. They are run and reported by gradient.py, the most telling first.

    native adamw     torch's fused AdamW on the plain module, states in the dtype of the weights (bf16)
    lsp d            (d, 4)-sparse projectors; Adam's moments on the GPU, on the CPU ("cpu"), or as many on the GPU as a
                     budget leaves room for ("17GB") and the rest on the CPU
    adam-offload     exact AdamW with fp32 states in host memory, layer by layer (updated by the CPU and the GPU, or by
                     the CPU alone: "cpu") or monolithic (by the CPU: ZeRO-Offload's order)
    lora, galore     baselines; GaLore's first SVD (minutes) is left out: its bases are drawn at random

Projectors are random here, since the time of a step does not depend on their numbers; what learning them costs is a
reverse and a fit every check_freq steps, outside of these times. The same for their bias: lsp_bias.py.
"""

import time
from typing import Any

from keyhole.bench.gradient_trials import Trial


def _lsp(shape: str, d: int, label: str = "", gpu_memory: str | None = None, **options: Any) -> Trial:
    how = {"d": d, "r": 4, "learn": False, "activations": "host", **options}
    return Trial(f"{shape} lsp d={d}{label}", shape, "lsp", gpu_memory=gpu_memory, options=how)


def _offload(shape: str, schedule: str, **options: Any) -> Trial:
    how = {"schedule": schedule, "activations": "host", **options}
    label = (" cpu" if options.get("gpu_updates") is False else "") + (" compiled" if options.get("compile") else "")
    return Trial(f"{shape} adam-offload {schedule}{label}", shape, "adam-offload", options=how)


COMPILED = {"compile": True}
SPANS = ("forward", "reverse", "down", "update", "up", "exposed down", "exposed update", "exposed up")
LEAN = {"d": 1024, "r": 4, "learn": False, "activations": "host", "optimizer_on": "cpu", "others": "frozen"}
TRIALS = [
    Trial("7B native adamw", "7B", "native", options={"optimizer": "adamw"}),
    _lsp("7B", 2048, " 17GB compiled", gpu_memory="17GB", **COMPILED),
    _lsp("7B", 2048, " compiled", **COMPILED),
    _lsp("7B", 2048, " cpu compiled", optimizer_on="cpu", **COMPILED),
    _lsp("7B", 512, " compiled", **COMPILED),
    _lsp("7B", 2048, " plain blocks"),
    Trial("3.5B native adamw", "3.5B", "native", options={"optimizer": "adamw"}),
    _offload("3.5B", "layerwise", **COMPILED),
    _offload("3.5B", "monolithic", **COMPILED),
    _offload("3.5B", "layerwise", gpu_updates=False, **COMPILED),
    _lsp("3.5B", 2048, " compiled", **COMPILED),
    _offload("7B", "layerwise"),
    _lsp("7B", 256, " compiled", **COMPILED),
    _lsp("7B", 1024, " compiled", **COMPILED),
    _lsp("7B", 2048, " runs compiled", kind="runs", **COMPILED),
    Trial("7B lsp d=1024 cpu streamed 8GiB", "7B", "lsp", gpu_memory="8GiB", streamed=True,
          compare="7B lsp d=1024 compiled", options=LEAN | COMPILED),
    Trial("7B lora r=8", "7B", "lora", options={"r": 8, "activations": "block"}),
    Trial("7B galore rank=128", "7B", "galore", options={"rank": 128, "activations": "block", "svd": False}),
    _lsp("3.5B", 512, " compiled", **COMPILED),
    _offload("3.5B", "layerwise"),
]  # fmt: skip


def adapted(options: dict[str, Any], quick: bool) -> dict[str, Any]:
    """The options of a trial for its method: small for quick runs; GaLore without its SVD where that was asked for."""
    options = {key: ("aot_eager" if quick and key == "compile" else value) for key, value in options.items()}
    if quick and "d" in options:
        options["d"] = 16
    if options.pop("svd", True) is False:
        _leave_out_svd()
    return options


def _leave_out_svd() -> None:
    import torch

    from keyhole.methods.baselines import galore

    def drawn(grad: torch.Tensor, rank: int) -> torch.Tensor:
        side = min(grad.shape[-2:])
        return torch.linalg.qr(torch.randn(*grad.shape[:-2], side, rank, device=grad.device)).Q

    galore.projector = drawn


def parts(method: Any) -> dict[str, float]:
    """Where the time of the last step went, as far as the method knows; the device has been waited for."""
    found = {key: float(value) for key, value in getattr(method, "metrics", dict)().items()}
    if getattr(method, "name", None) == "adam-offload":
        found["update_s"] = method.updates.host_s
    spans = getattr(getattr(method, "updates", None), "timing", None)
    if spans is not None:
        seconds = spans.read()
        found |= {f"{name.replace(' ', '_')}_s": seconds.get(name, 0.0) for name in SPANS}
        found["layer_update_s"] = spans.mean("update")
    return found


def updates_alone_s(method: Any) -> float | None:
    """Seconds of all updates of a step of adam-offload, by whoever makes them, when nobody else is at work: its floor.
    (With a learning rate of 0, from whatever the staging buffers hold: nothing is trained afterwards.)"""
    if getattr(method, "name", None) != "adam-offload":
        return None
    from keyhole.methods.adam_offload.state import AdamStep

    method.flush()
    numbers = method.exchange.down.numbers(len(method.slots) + 2)
    step = AdamStep(0.0, numbers, numbers, method.slots, waits_for_norm=False)
    given: dict[int, list[int]] = {}
    for at, one in sorted(method.state.trained.items()):
        given.setdefault(one.unit.index, []).append(at)
    begin_s = time.perf_counter()
    for unit in method.state.units:
        method.updates.submit(step, unit, given[unit.index], None)
    method.exchange.drain()
    return time.perf_counter() - begin_s
