"""Seconds a step of `lsp` with part of its moments on the CPU, by the number of threads that update them.

    python benchmarks/lsp_threads.py [--gpu-memory 17GB] [--threads 12,10,14,15]

Llama-7B shape, bf16, 4 x 1024 tokens, d = 2048, r = 4, compiled blocks, projectors drawn and not learned; native fused
AdamW in the same process. Floor: the step with all moments on the GPU (`keyhole bench lsp`). The threads that launch
kernels need cores as well: more threads for the updates is not faster from some point on.
"""

import argparse
import dataclasses

import torch

from keyhole.bench import gradient, measure
from keyhole.bench.gradient_trials import VOCABULARY
from keyhole.bench.lsp import TRIALS

WARM_UP, TIMED = 3, 5


def seconds(method: object, device: torch.device) -> float:
    """Of a step, one after the other without a wait between, as a run makes them."""
    ids = torch.randint(4, VOCABULARY, (4, 1024), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    return measure.time_steps(lambda: method.step(batch), device, WARM_UP, TIMED, lambda: None)["wall_s"]


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--gpu-memory", default="17GB")
    ask.add_argument("--threads", default="12,10,14,15")
    args = ask.parse_args()
    device = torch.device("cuda", 0)
    trials = {trial.name: trial for trial in TRIALS}
    native, lsp = trials["7B native adamw"], trials["7B lsp d=2048 17GB compiled"]
    lsp = dataclasses.replace(lsp, gpu_memory=args.gpu_memory)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    model = gradient.load_trial(native, device, False, 4096)
    native_s = seconds(gradient.method_of(native, model, False), device)
    print(f"native AdamW {native_s:.4f} s", flush=True)
    del model
    measure.clean_up(device)
    model = gradient.load_trial(lsp, device, False, 4096)
    for threads in args.threads.split(","):
        measure.clean_up(device)
        trial = dataclasses.replace(lsp, options=lsp.options | {"threads": int(threads)})
        method = gradient.method_of(trial, model, False)
        step_s, spans = seconds(method, device), method.optimizer.spans
        peak = torch.cuda.max_memory_allocated(device) / 2**30
        print(
            f"threads {threads:>2}: {step_s:.4f} s, {native_s / step_s:.2f}x of native AdamW; one update "
            f"{1e3 * spans.mean('update'):.1f} ms; peak {peak:.2f} GiB",
            flush=True,
        )
        method.flush()
        method.close()
        del method
    model.close()


if __name__ == "__main__":
    main()
