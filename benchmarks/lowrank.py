"""Zeroth-order steps with low-rank directions beside dense ones and textbook MeZO, on an OPT shape.

    python benchmarks/lowrank.py [--model 13B] [--batch 16] [--length 64] [--rank 2] [--refresh 50] [--stream]
    python benchmarks/lowrank.py --batch 1 --length 2048 --int4 8GiB        also over a frozen 4-bit base, in that
                                                                          budget and fully streamed
    python benchmarks/lowrank.py --parts          kernels that low rank adds to a block, one by one
    python benchmarks/lowrank.py --profile        which kernels a resident low-rank step spends its time in
    python benchmarks/lowrank.py --quick          a tiny model on the CPU, to see that everything runs

One process, one copy of the weights (random, bf16), one system after the other; the textbook loop runs last, since it
takes over the weights. Floors, printed beside the steps: the products of both signs at the rate of a large product of
this run, and at the rate of this model's own products with as many rows as a pass has; for a streamed step the uploaded
bytes at the measured rate. A GPU that multiplies for seconds is held at its power limit, and then slower than in a
short measurement: so the products of all layers are also timed in a row, with the model's own weights, for as many
rounds as there are steps and directly after them.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole import ops
from keyhole.bench import measure
from keyhole.bench.link import measure_link
from keyhole.bench.shapes import QUICK, QUICK_VOCABULARY, SHAPES, VOCABULARY, opt_config
from keyhole.bench.zo.textbook import Textbook, take_weights
from keyhole.methods.workload import Workload
from keyhole.methods.zo.traits import ZOConfig

LR, EPS = 1e-7, 1e-3


def products(width: int) -> list[tuple[str, int, int, int]]:
    """(name, how often per block, inputs, outputs) of an OPT block's linear layers."""
    return [("q, k, v, out", 4, width, width), ("fc1", 1, width, 4 * width), ("fc2", 1, 4 * width, width)]


def timed(work: Any, device: torch.device, repeats: int = 20) -> float:
    found = measure.time_parts({"work": work}, device, 3, repeats)
    return found["work"]["s"]


def floors(args: argparse.Namespace, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> dict:
    """Seconds of the products of one step, at two rates."""
    width, blocks, _ = shape
    rows = 2 * args.batch * args.length
    vocabulary = QUICK_VOCABULARY if args.quick else VOCABULARY
    flop = 2 * rows * (blocks * 12 * width**2 + vocabulary * width)
    side = 256 if args.quick else 8192
    a = torch.randn(side, side, device=device, dtype=dtype)
    square_s = timed(lambda: a @ a, device)
    own_s = 0.0
    for _, count, inputs, outputs in products(width):
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        w = torch.randn(outputs, inputs, device=device, dtype=dtype)
        own_s += blocks * count * timed(lambda x=x, w=w: x @ w.t(), device)
    return {"flop": flop, "square_s": flop * square_s / (2 * side**3), "own_s": own_s}


def products_in_a_row(model: Any, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """Seconds of the products of one step, all layers one after the other, in rounds without a pause."""
    weights = [m.weight for m in model.module.modules() if isinstance(m, torch.nn.Linear)]
    rows = 2 * args.batch * args.length
    inputs = {width: torch.randn(rows, width, device=device, dtype=dtype) for width in {w.shape[1] for w in weights}}

    def all_layers() -> None:
        for w in weights:
            torch.mm(inputs[w.shape[1]], w.t())

    return measure.time_parts({"products": all_layers}, device, args.warm_up, args.steps)["products"]


def show_parts(args: argparse.Namespace, width: int, device: torch.device, dtype: torch.dtype) -> None:
    """Microseconds of each layer's product, of the product that adds to its output, and of the small kernels."""
    rows, rank = 2 * args.batch * args.length, args.rank
    print(f"{'layer':>12} {'x W^T':>8} {'y + x W^T':>10} {'narrow':>8} {'widen':>8} {'fold':>8}   us, {rows} rows")
    for name, _, inputs, outputs in products(width):
        x = torch.randn(rows, inputs, device=device, dtype=dtype)
        w = torch.randn(outputs, inputs, device=device, dtype=dtype)
        v, b = torch.randn(rank, inputs, device=device, dtype=dtype), torch.randn(2, rank, outputs, device=device)
        bias, y = torch.randn(2, outputs, device=device), torch.zeros(rows, outputs, device=device, dtype=dtype)
        p = ops.narrow(x, v).view(2, -1, rank)
        parts = {
            "product": lambda x=x, w=w: x @ w.t(),
            "into": lambda x=x, w=w, y=y: y.addmm_(x, w.t()),
            "narrow": lambda x=x, v=v: ops.narrow(x, v),
            "widen": lambda p=p, b=b, bias=bias: ops.widen(p, b, bias, dtype),
            "fold": lambda w=w, b=b, v=v: ops.fold_(w, b[0], v, rounding="stochastic"),
        }
        found = {part: 1e6 * timed(work, device) for part, work in parts.items()}
        print(
            f"{name:>12} " + " ".join(f"{us:>{w}.1f}" for us, w in zip(found.values(), (8, 10, 8, 8, 8), strict=True))
        )


def show_kernels(step: Any, what: str, steps: int = 3) -> None:
    """Milliseconds per step of the kernels that take longest, and of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"{what}: {total / steps / 1e3:.2f} ms of kernels per step")
    for row in rows[:24]:
        ms, each = row.self_device_time_total / steps / 1e3, row.self_device_time_total / max(1, row.count)
        print(f"{ms:9.3f} ms {row.count // steps:6} x {each:8.1f} us  {row.key[:90]}")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--model", default="13B", choices=SHAPES)
    ask.add_argument("--blocks", type=int, help="fewer blocks than the model has")
    ask.add_argument("--batch", type=int, default=16)
    ask.add_argument("--length", type=int, default=64)
    ask.add_argument("--rank", type=int, default=2)
    ask.add_argument("--refresh", type=int, default=50)
    ask.add_argument("--steps", type=int, default=20)
    ask.add_argument("--warm-up", type=int, default=6)
    ask.add_argument("--stream", action="store_true", help="stream the weights too, dense and with low rank")
    ask.add_argument("--int4", metavar="BUDGET", help="low rank over a frozen base, in a budget and streamed entirely")
    ask.add_argument("--no-textbook", action="store_true")
    ask.add_argument("--parts", action="store_true")
    ask.add_argument("--profile", action="store_true")
    ask.add_argument("--quick", action="store_true")
    ask.add_argument("--out", type=Path, help="a JSON file for the numbers")
    args = ask.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not args.quick else torch.device("cpu")
    if args.quick:
        args.batch, args.length, args.steps, args.warm_up, args.refresh = 2, 8, 3, 2, 2
    dtype, shape = (torch.float32 if args.quick else torch.bfloat16), QUICK if args.quick else SHAPES[args.model]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}; OPT-{args.model}, {args.batch} x {args.length} tokens, rank {args.rank}")
    if args.parts:
        show_parts(args, shape[0], device, dtype)
        return
    shape = (shape[0], min(shape[1], args.blocks or shape[1]), shape[2])
    floor = floors(args, shape, device, dtype)
    print(f"products of both signs: {floor['square_s']:.4f} s as one large product, {floor['own_s']:.4f} s by layer")
    found: dict[str, Any] = {"floor": floor, "asked": {k: str(v) for k, v in vars(args).items()}, "gpu": name}
    config = opt_config(args.model, max(2048, args.length), blocks=args.blocks, quick=args.quick)
    batch = measure.random_batch(args.batch, args.length, config.vocab_size)
    low = {"rank": args.rank, "refresh": args.refresh}
    stream: dict[str, Any] = {"placement": "stream"}
    plans: list[tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = [
        ("resident", {"placement": "resident"}, {"dense": {}, "low rank": low})
    ]
    if args.stream:
        plans.append(("streamed", stream, {"dense": {}, "low rank": low}))
    if args.int4:
        frozen = {"low rank": low | {"fold": False}}
        budget = {} if args.quick else {"gpu_memory": args.int4}
        plans.append((f"int4 in {args.int4}", stream | budget | {"wire": "int4"}, frozen))
        plans.append(("int4, all streamed", stream | {"wire": "int4"}, frozen))
    for where, place, systems in plans:
        work = Workload("zo", args.batch * args.length, 2, ZOConfig(**list(systems.values())[-1]), length=args.length)
        made = {"init": "random", "dtype": str(dtype).removeprefix("torch."), "device": device, "workload": work}
        model = keyhole.load(config, **made, **place)
        for system, how in systems.items():
            method = keyhole.ZO(model, LR, eps=EPS, **how)
            measure.clean_up(device)
            times = measure.time_steps(lambda m=method: m.step(batch), model.engine, args.warm_up, args.steps)
            if args.profile:
                show_kernels(lambda m=method: m.step(batch), f"{where}, {system}")
            found[f"{where}, {system}"] = times | {"device": measure.device_memory(device)}
            _say(f"{where}, {system}", times, found, floor, device)
            if where == "resident" and device.type == "cuda":
                row = found[f"{where}, {system}"]["products_in_a_row"] = products_in_a_row(model, args, device, dtype)
                print(f"{'its products in a row':>28}: {row['s']:.4f} s, the step {times['step_s'] / row['s']:.2f}x")
            method.flush()
            del method
        if where == "resident" and not args.no_textbook:
            model.low_rank.settle()  # what was learned goes into the weights, and the layers are ordinary again
            take_weights(model)
            textbook = Textbook(model.module, LR, eps=EPS)
            measure.clean_up(device)
            times = measure.time_steps(lambda t=textbook: t.step(batch), model.engine, 2, max(3, args.steps // 4))
            found["textbook"] = times | {"device": measure.device_memory(device)}
            _say("textbook MeZO", times, found, floor, device)
            del textbook
        model.close()
        del model
        measure.clear_device(device)
    if device.type == "cuda" and len(plans) > 1:
        found["link"] = measure_link(128 * 2**20)
        print(f"link: {found['link']['up']:.1f} GB/s up")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))


def _say(what: str, times: dict, found: dict, floor: dict, device: torch.device) -> None:
    dense, textbook = (found.get(key, times)["step_s"] for key in ("resident, dense", "textbook"))
    step_s, gib = times["step_s"], measure.device_memory(device)["reserved_bytes"] / 2**30
    spread = (times["max_s"] - times["min_s"]) / 2 / step_s
    words = f"{what:>28}: {step_s:.4f} s per step (+- {spread:.0%}, wall {times['wall_s']:.4f})"
    words += f", {dense / step_s:.2f}x of the dense resident step, {step_s / floor['own_s']:.2f}x of its products"
    words += f", {textbook / step_s:.2f}x of textbook MeZO" if "textbook" in found else ""
    up, down = times["bytes_up"] / 1e9, times["bytes_down"] / 1e9
    print(f"{words}, {gib:.1f} GiB" + (f", {up:.1f} GB up, {down:.1f} GB down" if up else ""), flush=True)


if __name__ == "__main__":
    main()
