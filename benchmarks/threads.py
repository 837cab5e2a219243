"""Seconds a step of a method that updates on the CPU, by the number of threads that do it.

    python benchmarks/threads.py [--trial "7B lsp d=2048 17GB compiled"] [--threads 12,10,14,15]

A trial is one of `keyhole bench lsp`, lsp or adam-offload (Llama shapes, bf16, 4 x 1024 tokens); native fused AdamW
runs in the same process. The threads that launch kernels need cores as well: more threads for the updates is not
faster from some point on. Floor of lsp: the step with all moments on the GPU (`keyhole bench lsp`). Floor of
adam-offload: its updates with nothing else at work, printed beside.
"""

import argparse
import dataclasses

import torch

from keyhole.bench import gradient, measure
from keyhole.bench.gradient_trials import VOCABULARY
from keyhole.bench.lsp import TRIALS, updates_alone_s

WARM_UP, TIMED = 3, 5


def seconds(method: object, device: torch.device) -> float:
    """Of a step, one after the other without a wait between, as a run makes them."""
    ids = torch.randint(4, VOCABULARY, (4, 1024), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    return measure.time_steps(lambda: method.step(batch), device, WARM_UP, TIMED, lambda: None)["wall_s"]


def update_s(method: object) -> float:
    """Of all updates of the last step, on the CPU."""
    spans = getattr(getattr(method, "optimizer", None), "spans", None)
    return method.updates.host_s if spans is None else spans.read()["update"]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--trial", default="7B lsp d=2048 17GB compiled")
    ask.add_argument("--threads", default="12,10,14,15")
    args = ask.parse_args()
    device = torch.device("cuda", 0)
    trials = {trial.name: trial for trial in TRIALS}
    if args.trial not in trials:
        ask.error(f"--trial: one of {', '.join(name for name in trials if 'native' not in name)}")
    chosen = trials[args.trial]
    native = trials[f"{chosen.shape} native adamw"]
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {chosen.name}", flush=True)
    model = gradient.load_trial(native, device, False, 4096)
    native_s = seconds(gradient.method_of(native, model, False), device)
    print(f"native AdamW {native_s:.4f} s", flush=True)
    del model
    measure.clean_up(device)
    model = gradient.load_trial(chosen, device, False, 4096)
    for threads in args.threads.split(","):
        measure.clean_up(device)
        trial = dataclasses.replace(chosen, options=chosen.options | {"threads": int(threads)})
        method = gradient.method_of(trial, model, False)
        step_s = seconds(method, device)
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        print(
            f"threads {threads:>2}: {step_s:.4f} s, {native_s / step_s:.2f}x of native AdamW; updates "
            f"{update_s(method):.3f} s (alone {updates_alone_s(method) or float('nan'):.3f}); peak {peak:.2f} GiB",
            flush=True,
        )
        method.flush()
        method.close()
        del method
    model.close()


if __name__ == "__main__":
    main()
