"""Up to which rate are directions of low rank stable, beside dense ones? On quadratic losses, in seconds to minutes.

    python benchmarks/low_rank_rate.py [--runs 24] [--steps 400] [--size 24]

The loss is tr(S E C E^T) / 2 of one matrix E, with diagonal S (outputs) and C (inputs) of trace 1, whose eigenvalues
fall as i^-p. A zeroth-order step with the exact slope is E <- E - lr (G . z) z, G = S E C, with z dense or U V^T /
sqrt(r), and V kept for `refresh` steps. A rate counts as stable if the loss of at least half of the runs is below three
times its start after all steps; the limit is found by bisection. methods/zo/rate_search.py and docs/methods.md have the
formula that this is compared with.
"""

import argparse

import torch

SPECTRA = ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (0.3, 1.5))
DIRECTIONS = ((None, 0), (1, 50), (2, 1), (2, 10), (2, 50), (4, 50), (8, 50))  # (rank, refresh); None: dense


def grows(lr: float, s: torch.Tensor, c: torch.Tensor, rank: int | None, refresh: int, runs: int, steps: int) -> bool:
    """Whether most of the runs, side by side, have a larger loss after the steps."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(runs, *shape, generator=generator, dtype=torch.float64)

    def losses() -> torch.Tensor:
        return (s[:, None] * e.square() * c).sum((1, 2))

    e = normal(len(s), len(c)) / 10
    begin, v = losses(), torch.empty(0)
    for step in range(steps):
        if rank is None:
            z = normal(len(s), len(c))
        else:
            v = normal(len(c), rank) / rank**0.5 if step % refresh == 0 else v
            z = normal(len(s), rank) @ v.mT
        slope = (s[:, None] * e * c * z).sum((1, 2), keepdim=True)
        e = (e - lr * slope * z).clamp(-1e30, 1e30)
    return float((losses() < 3 * begin).double().mean()) < 0.5


def limit(s: torch.Tensor, c: torch.Tensor, rank: int | None, refresh: int, runs: int, steps: int) -> float:
    """The largest rate that is stable, within 5 %."""
    low, high = 0.05, 8.0
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if grows(middle, s, c, rank, refresh, runs, steps) else (middle, high)
    return (low * high) ** 0.5


def main(argv: list[str] | None = None) -> dict[tuple[float, float], list[float]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=24)
    args = parser.parse_args(argv)
    names = ["dense" if rank is None else f"rank {rank}, V for {refresh}" for rank, refresh in DIRECTIONS]
    print("| eigenvalues of S, C | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    found = {}
    for powers in SPECTRA:
        s, c = (torch.arange(1, args.size + 1, dtype=torch.float64) ** -power for power in powers)
        s, c = s / s.sum(), c / c.sum()
        found[powers] = [limit(s, c, *kind, args.runs, args.steps) for kind in DIRECTIONS]
        cells = " | ".join(f"{x:.2f} ({x / found[powers][0]:.2f})" for x in found[powers])
        print(f"| i^-{powers[0]:g}, i^-{powers[1]:g} | {cells} |", flush=True)
    return found


if __name__ == "__main__":
    main()
