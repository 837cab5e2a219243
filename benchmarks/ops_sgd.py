"""LOMO's update of one block's matrices beside a plain copy: how far the kernel is from memory bandwidth.

    python benchmarks/ops_sgd.py        needs a GPU, a few seconds

The seven matrices of a Llama-3-8B block in bfloat16, gradients in one buffer per matrix as in a recorded step. Floor:
6 bytes per weight (gradient and weight read, weight written) at the rate of a copy on the same device.
"""

import torch

from keyhole import ops
from keyhole.bench.measure import replayed_ms
from keyhole.bench.rates import copy_rate

SHAPES = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]


def main() -> None:
    weights = [torch.randn(shape, device="cuda").bfloat16() for shape in SHAPES]
    grads = [torch.randn(shape, device="cuda").bfloat16() for shape in SHAPES]
    squares, scale = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    bad = torch.zeros((), dtype=torch.int32, device="cuda")
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    rate = torch.full((), 1e-4, device="cuda")
    step = torch.ones((), dtype=torch.int32, device="cuda")
    numel = sum(w.numel() for w in weights)
    floor_ms = 6 * numel / copy_rate(torch.device("cuda")) * 1e3
    sums = {"sum_squares": squares, "bad": bad, "changed": changed, "scale": scale}
    cases = {
        "stochastic, all sums, numbers on the device": {"lr": rate, "step": step, "rounding": "stochastic"} | sums,
        "stochastic, all sums": {"lr": 1e-4, "step": 1, "rounding": "stochastic"} | sums,
        "nearest, all sums": {"lr": 1e-4, "step": 1} | sums,
        "nearest, no sums": {"lr": 1e-4, "step": 1},
    }
    print(f"{numel / 1e6:.0f} M weights, floor {floor_ms:.3f} ms", flush=True)
    for name, how in cases.items():

        def update(how: dict = how) -> None:
            for i, (w, grad) in enumerate(zip(weights, grads, strict=True)):
                ops.sgd_update_(w, grad, offset=i << 30, **how)

        found = replayed_ms(update)
        print(f"{name:45} {found:7.3f} ms  {found / floor_ms:.2f} of the floor", flush=True)


if __name__ == "__main__":
    main()
