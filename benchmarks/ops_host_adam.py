"""Parameters per second of the host's AdamW, by chunk, threads and workers, beside torch's own kernel and a plain copy.

    python benchmarks/ops_host_adam.py [--numel 400000000]

Floor: bytes. One update reads 14 bytes per parameter and writes 14 (bf16 gradient and weight, fp32 master and moments);
torch's kernel alone on fp32 reads 16 and writes 12. The copy's rate (bytes read + written) is the rate of DRAM.
"""

import argparse
import threading
import time

import torch

from keyhole.ops.adam import host as host_adam


def rate(numel: int, work: object, repeats: int = 3) -> float:
    best_s = float("inf")
    for _ in range(repeats):
        begin_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return numel / best_s


def by_torch(state: list, grad: torch.Tensor) -> object:
    """torch's kernel, all in fp32, in one go."""
    full, count = grad.float(), [torch.tensor(1.0)]
    how = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    how |= {"amsgrad": False, "maximize": False}
    return lambda: torch._fused_adamw_([state[0]], [full], [state[1]], [state[2]], [], count, **how)


def by_workers(workers: int, threads: int, chunk_per_thread: int, state: list, grad: torch.Tensor) -> None:
    """The range shared out among `workers` Python threads of `threads` torch threads each."""
    numel = grad.numel()
    cuts = [numel * i // workers // 16 * 16 for i in range(workers)] + [numel]

    def part(begin: int, end: int) -> None:
        torch.get_num_threads()
        torch.set_num_threads(threads)
        scratch = torch.empty(chunk_per_thread * threads)
        views = [flat[begin:end] for flat in (*state, grad, grad)]
        host_adam.host_adamw_(*views, step=1, lr=1e-3, scratch=scratch)

    running = [threading.Thread(target=part, args=pair) for pair in zip(cuts, cuts[1:], strict=False)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--numel", type=int, default=400_000_000)
    ask.add_argument("--cores", type=int, default=torch.get_num_threads())
    args = ask.parse_args()
    numel, cores = args.numel, args.cores
    state = [torch.randn(numel), torch.randn(numel) * 1e-3, torch.rand(numel) * 1e-6]
    grad = torch.randn(numel).to(torch.bfloat16)
    print(f"{cores} threads, {numel / 1e6:.0f} M parameters")
    for threads in sorted({cores, cores - 1, cores // 2} - {0}):
        torch.set_num_threads(threads)
        copied = rate(numel, lambda: state[0].copy_(state[1]))
        state[0].normal_()
        alone = rate(numel, by_torch(state, grad))
        print(f"threads {threads:2d}: copy {copied * 8 / 1e9:6.1f} GB/s, torch fp32 {alone / 1e9:5.2f} G/s")
    torch.set_num_threads(cores)
    for kib in (8, 16, 32, 64, 128, 256):
        row = [f"chunk {kib:3d} Ki per thread:"]
        for workers, threads in ((1, cores), (1, cores - 1), (2, cores // 2), (4, cores // 4), (cores, 1)):
            if threads > 0:
                got = rate(numel, lambda: by_workers(workers, threads, kib * 1024, state, grad), 2)  # noqa: B023
                row.append(f"{workers}x{threads} {got / 1e9:5.2f}")
        print("   ".join(row))


if __name__ == "__main__":
    main()
