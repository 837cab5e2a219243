"""Two ranks on one GPU, over gloo, beside one process: what they compute, their host memory, what torchrun costs.

    python benchmarks/ranks_one_gpu.py [--only exact,speed,shared,memory] [--shape 1.3B] [--large 13B] [--small 125M]
                                       [--steps 12] [--out FILE.json]
    python benchmarks/ranks_one_gpu.py --quick        tiny shapes on a CPU: shows that everything runs

OPT shapes with random weights, streamed. Every run is a process of its own, or processes under torchrun:

    exact     zo, lomo, adam-offload and lsp on the small shape in float32, alone and on two ranks: zo to the bit, the
              others to 1e-4 in losses and weights (Adam divides by |g| + eps: its eps here is 1e-3)
    speed     zo and lomo on --shape in bf16, alone and under torchrun with one rank, in turns: the median step, the
              better of two runs
    shared    the same on two ranks: both share the GPU, and gloo carries all weights of lomo
    memory    zo on the large shape in bf16, alone and on two ranks: host memory by the kernel's proportional set size,
              in which pages that several processes map count once; and of that what holds streamed weights

Rows are printed as they come, with a verdict where there is a target: bits equal, 1e-4, host memory of two ranks at
most 1.05 of one, one rank under torchrun at most 1 % slower than none.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench.shapes import opt_config
from keyhole.ranks.join import joined

CLASSES = {"zo": keyhole.ZO, "lomo": keyhole.LOMO, "adam-offload": keyhole.AdamOffload, "lsp": keyhole.LSP}
RATES = {"zo": 1e-4, "lomo": 1e-2, "adam-offload": 1e-4, "lsp": 1e-4}
OWN = {"adam-offload": {"eps": 1e-3}, "lsp": {"eps": 1e-3, "d": 256, "optimizer_on": "cpu"}}
CLOSE = 1e-4
SPEED = ("zo", "lomo")


@dataclass(frozen=True)
class Task:
    """What a process trains. keep: its weights are written down, to be compared; sums: those of their bits."""

    method: str
    shape: str
    dtype: str
    steps: int
    tokens: int
    keep: bool = False
    sums: bool = False
    quick: bool = False


# -- in a process of a run ---------------------------------------------------------------------------------------------


def micro_batches(step: int, tokens: int, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """Two of one row."""
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(5, vocabulary, (1, tokens), generator=generator) for _ in range(2)]
    return [{"input_ids": one, "labels": one.clone()} for one in ids]


def bits_of(tensor: torch.Tensor) -> list[int]:
    """Two sums that tell one tensor from another."""
    whole = tensor.detach().contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    sums = [(int(part.sum(dtype=torch.int64)), int(part[::2].sum(dtype=torch.int64))) for part in whole.split(2**26)]
    return [sum(each) for each in zip(*sums, strict=True)]


def trained(task: Task, ranks: Any, directory: Path) -> dict[str, Any]:
    """Losses, seconds of steps and memory of one task; weights in a file, or sums of their bits."""
    config = opt_config(task.shape, length=task.tokens, quick=task.quick)
    device = ranks.device("cpu" if task.quick else None)
    work = keyhole.Workload(task.method, tokens=task.tokens, passes=4)
    how = {"init": "random", "device": device, "dtype": task.dtype, "placement": "stream", "workload": work}
    model = keyhole.load(config, ranks=ranks, **how)
    method = CLASSES[task.method](model, RATES[task.method], **OWN.get(task.method, {}))
    losses, seconds = [], []
    for step in range(task.steps):
        begin_s = time.perf_counter()
        losses.append(float(method.step(micro_batches(step, task.tokens, config.vocab_size))))
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - begin_s)
    method.flush()
    model.engine.wait_for_homes()
    found: dict[str, Any] = {"losses": losses, "seconds": seconds, "pss_bytes": pss_bytes(), "weights_bytes": 0}
    ranks.barrier()  # nobody leaves while others look at their memory
    found["weights_bytes"] = streamed_bytes(model)
    if task.keep:
        torch.save(
            [(name, begin, part.cpu().clone()) for name, begin, part in model.own_tensors()], directory / "parts"
        )
    elif task.sums:
        found["bits"] = {name: bits_of(tensor) for name, tensor in model.named_tensors()}
    ranks.barrier()
    model.close()
    return found


def pss_bytes(mapping: str | None = None) -> int:
    """Of this process, or of its mappings with this name: its proportional part of the memory behind them."""
    if mapping is None:
        text = Path("/proc/self/smaps_rollup").read_text()
        return next(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = mapping in line
        elif ours and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def streamed_bytes(model: Any) -> int:
    """Host memory of streamed weights, as far as it is this process's."""
    own = [model.engine.kept(page) for page in model.engine.on_host if page not in model.engine.shared]
    return sum(flat.nbytes for flat in own) + (pss_bytes("memfd:keyhole") if model.engine.shared else 0)


def work(tasks: list[Task], directory: Path) -> None:
    with joined() as ranks:
        for number, task in enumerate(tasks):
            place = directory / f"{number} {ranks.rank}"
            place.mkdir(parents=True)
            (place / "found.json").write_text(json.dumps(trained(task, ranks, place)))


# -- who starts them ---------------------------------------------------------------------------------------------------


def run(tasks: list[Task], ranks: int | None, root: Path) -> list[list[dict[str, Any]]]:
    """What each rank has found, by task; ranks: under torchrun, None: without."""
    directory = Path(tempfile.mkdtemp(dir=root))
    words = [str(Path(__file__).resolve()), "--work", json.dumps([asdict(task) for task in tasks])]
    words += ["--directory", str(directory)]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])}
    if ranks:  # torchrun would set it to 1; alone, PyTorch takes all cores
        env |= {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *start, *words], env=env, check=True)
    print(f"  {ranks or 'no'} torchrun ranks: {time.perf_counter() - begin_s:.0f} s", file=sys.stderr, flush=True)
    found = []
    for number in range(len(tasks)):
        places = [directory / f"{number} {rank}" for rank in range(ranks or 1)]
        found.append([json.loads((place / "found.json").read_text()) | {"place": str(place)} for place in places])
    return found


def farthest(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> float:
    """The largest difference of losses, relative, and of weights, absolute, between one process and two."""
    pairs = zip(one[0]["losses"], two[0]["losses"], strict=True)
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    alone = {name: tensor.flatten() for name, _, tensor in torch.load(Path(one[0]["place"]) / "parts")}
    seen = {name: 0 for name in alone}
    for rank in two:
        for name, begin, part in torch.load(Path(rank["place"]) / "parts"):
            worst = max(worst, float((alone[name][begin : begin + part.numel()] - part.flatten()).abs().max()))
            seen[name] += part.numel()
    assert all(seen[name] >= tensor.numel() for name, tensor in alone.items()), "a part is missing"
    return worst


def same_bits(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    """Losses, and weights by the sums of their bits or as they were kept."""
    if any(rank["losses"] != one[0]["losses"] for rank in two):
        return False
    if "bits" in one[0]:
        return all(rank["bits"] == one[0]["bits"] for rank in two)
    return farthest(one, two) == 0.0


def verdict(good: bool) -> str:
    return "yes" if good else "**no**"


def exact(asked: argparse.Namespace, root: Path, records: dict[str, Any]) -> Iterator[str]:
    """Rows on what two ranks compute."""
    tasks = [
        Task(name, asked.small, "float32", 3, min(asked.tokens, 256), keep=True, quick=asked.quick) for name in CLASSES
    ]
    one, two = run(tasks, None, root), run(tasks, 2, root)
    records["exact"] = {"one": one, "two": two}
    for task, a, b in zip(tasks, one, two, strict=True):
        worst = farthest(a, b)
        good = same_bits(a, b) if task.method == "zo" else worst <= CLOSE
        losses = [f"loss {rank[0]['losses'][-1]:.6f}" for rank in (a, b)]
        shown = f"{losses[0]} | {losses[1]} | farthest {worst:.1e}"
        yield f"| {task.method}, {task.shape}, float32 | {shown} | {verdict(good)} |"


def step_s(found: list[dict[str, Any]]) -> float:
    return statistics.median(found[0]["seconds"][1:])


def speed(asked: argparse.Namespace, root: Path, records: dict[str, Any]) -> Iterator[str]:
    """Rows on seconds per step."""
    tasks = [Task(name, asked.shape, asked.dtype, asked.steps, asked.tokens, quick=asked.quick) for name in SPEED]
    alone, joined_one = [], []
    for _ in range(1 if asked.quick else 2):
        alone.append(run(tasks, None, root))
        joined_one.append(run(tasks, 1, root))
    records["speed"] = {"alone": alone, "torchrun, one rank": joined_one}

    for number, task in enumerate(tasks):
        best = [min(step_s(one[number]) for one in each) for each in (alone, joined_one)]
        slower = best[1] / best[0] - 1
        shown = f"{best[0]:.4f} s | torchrun, one rank: {best[1]:.4f} s | {slower:+.2%}"
        yield f"| {task.method}, {task.shape}, {asked.dtype}: per step | {shown} | {verdict(slower <= 0.01)} |"


def shared_gpu(asked: argparse.Namespace, root: Path, records: dict[str, Any]) -> Iterator[str]:
    """Rows on seconds per step of two ranks."""
    tasks = [Task(name, asked.shape, asked.dtype, 3, asked.tokens, quick=asked.quick) for name in SPEED]
    both = records["shared"] = run(tasks, 2, root)
    for task, found in zip(tasks, both, strict=True):
        yield f"| {task.method}, {task.shape} on two ranks | | {step_s(found):.3f} s | one GPU and gloo for both | |"


def memory(asked: argparse.Namespace, root: Path, records: dict[str, Any]) -> Iterator[str]:
    """Rows on host memory."""
    tasks = [Task("zo", asked.large, asked.dtype, 3, asked.tokens, sums=True, quick=asked.quick)]
    one, two = run(tasks, None, root), run(tasks, 2, root)
    records["memory"] = {"one": one, "two": two}
    yield f"| zo, {asked.large}, {asked.dtype}: bits | | | equal | {verdict(same_bits(one[0], two[0]))} |"
    for key, what in (("pss_bytes", "host memory"), ("weights_bytes", "of that, streamed weights")):
        a, b = one[0][0][key], sum(rank[key] for rank in two[0])
        shown = f"{a / 2**30:.2f} GiB | {b / 2**30:.2f} GiB | {b / a:.3f}"
        yield f"| zo, {asked.large}: {what} | {shown} | {verdict(b <= 1.05 * a)} |"


PARTS = {"exact": exact, "speed": speed, "shared": shared_gpu, "memory": memory}


def told(records: Any) -> Any:
    """Without directories and sums of bits."""
    if isinstance(records, dict):
        return {key: told(value) for key, value in records.items() if key not in ("place", "bits")}
    return [told(value) for value in records] if isinstance(records, list) else records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.3B")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--large", default="13B")
    parser.add_argument("--small", default="125M")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work([Task(**task) for task in json.loads(arguments.work)], arguments.directory)
        return
    if arguments.quick:
        arguments.small = arguments.shape = arguments.large = "tiny"
        arguments.steps, arguments.tokens = 3, 16
    arguments.dtype = "float32" if arguments.quick else "bfloat16"  # not every CPU multiplies the latter
    where, records = "CPU" if arguments.quick else torch.cuda.get_device_name(), {}
    print(f"torch {torch.__version__}, {where}; two micro-batches of one row of --tokens {arguments.tokens} per step")
    print("| what | one process | two ranks | | target met |", "|---|---|---|---|---|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for part in arguments.only.split(","):
            for line in PARTS[part](arguments, Path(root), records):
                print(line, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(told(records), indent=1) + "\n")


if __name__ == "__main__":
    main()
