"""Seconds per step of a method that updates on the CPU, by the number of threads for the updates.

    python benchmarks/threads.py [--trial "7B lsp d=2048 17GB compiled"] [--threads 12,10,14,15]

A trial is one of `keyhole bench lsp`, lsp or adam-offload (Llama shapes, bf16, 4 x 1024 tokens); native fused AdamW
runs in the same process. The threads that launch kernels need cores as well, so beyond some point more threads for
the updates are not faster. Floor of lsp: the step with all moments on the GPU (`keyhole bench lsp`). Floor of
adam-offload: its updates with nothing else running, printed beside.
"""

import argparse
import dataclasses

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.parts import step_parts, updates_alone_s
from keyhole.bench.gradient.trials import read_trials
from keyhole.bench.gradient.worker import load_trial, method_of
from keyhole.bench.rows import TABLES
from keyhole.machine.sizes import GIB
from keyhole.methods.base import Method

WARM_UP, TIMED = 3, 5


def seconds(method: Method, model: keyhole.Model) -> float:
    """Of a step, one after the other without a wait between, as a run makes them."""
    batch = measure.random_batch(4, 1024, model.config.vocab_size)
    return measure.time_steps(lambda: method.step(batch), model.engine, WARM_UP, TIMED)["wall_s"]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--trial", default="7B lsp d=2048 17GB compiled")
    ask.add_argument("--threads", default="12,10,14,15")
    args = ask.parse_args()
    device = torch.device("cuda", 0)
    trials = {trial.name: trial for trial in read_trials(TABLES / "lsp.yaml", "", quick=False)}
    if args.trial not in trials:
        ask.error(f"--trial: one of {', '.join(name for name in trials if 'native' not in name)}")
    chosen = trials[args.trial]
    native = trials[f"{chosen.shape} native adamw"]
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {chosen.name}", flush=True)
    model = load_trial(native, device, 1024)
    native_s = seconds(method_of(native, model), model)
    print(f"native AdamW {native_s:.4f} s", flush=True)
    del model
    measure.clean_up(device)
    model = load_trial(chosen, device, 1024)
    for threads in args.threads.split(","):
        measure.clean_up(device)
        trial = dataclasses.replace(chosen, options=chosen.options | {"threads": int(threads)})
        method = method_of(trial, model)
        step_s = seconds(method, model)
        peak = torch.cuda.max_memory_allocated(device) / GIB
        update_s, alone_s = step_parts(method)["update_s"], updates_alone_s(method) or float("nan")
        ratio = f"{step_s:.4f} s, {native_s / step_s:.2f}x of native AdamW"
        updates = f"updates {update_s:.3f} s (alone {alone_s:.3f})"
        print(f"threads {threads:>2}: {ratio}; {updates}; peak {peak:.2f} GiB", flush=True)
        method.flush()
        method.close()
        del method
    model.close()


if __name__ == "__main__":
    main()
