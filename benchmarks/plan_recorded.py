"""The planner against recorded measurements, without a GPU: bytes and seconds of the runs in benchmarks/records/.

    python -m benchmarks.plan_recorded                          # all records of an H200
    python -m benchmarks.plan_recorded --only lomo --all        # some of them; --all: ablations and early versions too
    python -m benchmarks.plan_recorded --checks                 # what plan_check.py measured, planned by today's code

Each record says what was loaded and how (shape, method, settings, budget, wire, tokens), what the allocator reserved,
the peak resident set of the process, and seconds per step. The planner's row is made as `keyhole plan` makes it, from
the config alone, with the placement that loading chose by the same code. Rates are the profile's, with the link of
the record where it was measured.

Records were taken over two days, while the code changed, several cases per process: a difference is a reason to look,
not a verdict. benchmarks/plan_check.py measures and plans with the same code; --checks plans its cases again, run by
run, each with the rates that were measured in the same run, and with the host's rates of its own process where they
were measured (from the sixth run on). The first run measured no `called` and `reversed`, and its
`launch` in another way; the second was on the same kind of machine, and what is bound by the host took 0.97 to 1.04 of
the time there (`apollo-mini`, `lomo-lora`, `sgd`). So the first is planned with these three rates of the second.

Two things were measured wrongly in the sixth run, and are replaced here; plan_check.py measures both otherwise since.
Steps of `adam-offload` were still getting longer when they were timed (0.229, 0.274, 0.314, 0.303 s; 0.186, 0.308,
0.344, 0.370): the median of the last two stands for the step (0.309 and 0.357; of all four 0.289 and 0.326). The host's
rates beside `sgd` were measured at a bad moment (`called` 39.1 us, where the other processes had 14 to 24): the least
of those of the two processes before it and the two after it are taken, as the least of a process's bursts is now.
Planned is 1.13 of its step with them; with the medians of the run it would be 1.24.

What the host bounds has got faster since the first five runs, without a change of the plan's other parts: one pass runs
without turns between threads, and views, modules and parameters are looked up once (LOG.md, "The planner against its
sixth run"). So the first five are planned too fast there: `lora`, `lomo-lora`, `apollo-mini`, and streamed `lsp` with
moments on the host. For these only the later runs count. In the seventh the rates were measured after
the steps, on a host whose speed changed in between: `lora` is planned at 0.76 of its time, `galore` at 0.79
(plan_check.py measures in turn since). In the eighth the link was measured once, at 33 GB/s upwards, while `zo` then
uploaded 7 GB in 0.132 s: the rate downwards, 55, is taken for both (measure.py measures twice since). On that host,
which others used, two steps took longer than planned from its rates: streamed `lsp` with moments on the host
0.408 s for 0.293 (0.260 in the sixth run), resident `adam-offload` 0.471 for 0.375 (0.309): what a host's memory and
cores do for several threads at once is not in the rates. In the ninth, with more rounds and the rates of link and CPU
beside the steps, `apollo-mini` alone was planned at 1.21 of its time; since then hooks follow the rate of autograd's
thread. In the tenth `galore` alone was planned at 1.17 (1.06 to 1.14 in the sixth, eighth and ninth); since then an
operation of its optimizer is 1.4 launches, not 1.6 (methods/launches.py). In the eleventh streamed `lsp` alone was
planned at 0.83. Its launches were not all counted; and since the twelfth run its embedding's moments are on the GPU and
the host gets a block's gradients in one piece, so what earlier runs measured of it is left out here. In the twelfth
`apollo-mini` alone was planned at 1.16.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.plan_check import HOST, Case, dry, line, summary
from keyhole.bench.shapes import llama_config, model_config
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import Bytes
from keyhole.methods import METHODS
from keyhole.methods.workload import Room
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.costs import Costs
from keyhole.plan.fit import fit
from keyhole.plan.placement import USABLE
from keyhole.plan.profiles import profile
from keyhole.plan.table import Question, make_row

RECORDS = Path(__file__).parent / "records"
LATEST = (
    "zo_h200_2026-11-16", "zo_h200_2026-11-15_h", "zo_h200_2026-11-15_i", "zo_h200_2026-11-15_j",
    "zo_h200_2026-11-15_e",
    "lomo_h200_2026-11-16", "lsp_h200_2026-11-15_3.5B_d", "lsp_h200_2026-11-15_7B_c", "lsp_h200_2026-11-15_7B_d",
    "frozen_base_h200_2026-11-16", "low_rank_h200_2026-11-16_long", "low_rank_h200_2026-11-16_short",
)  # fmt: skip
CHECKS = (
    "plan_check_h200_2026-11-16",
    "plan_check_h200_2026-11-16_b",
    "plan_check_h200_2026-11-16_c",
    "plan_check_h200_2026-11-17",
    "plan_check_h200_2026-11-17_b",
    "plan_check_h200_2026-11-17_c",
    "plan_check_h200_2026-11-17_d",
    "plan_check_h200_2026-11-17_e",
    "plan_check_h200_2026-11-17_f",
    "plan_check_h200_2026-11-17_g",
    "plan_check_h200_2026-11-17_h",
    "plan_check_h200_2026-11-17_i",
    "plan_check_h200_2026-11-17_j",
)
SIXTH, EIGHTH = CHECKS[5], CHECKS[7]
RISING, UNUSUAL = "adam-offload", "sgd"  # in it
TWELFTH, PLACED_OTHERWISE = CHECKS[11], ("lsp", "stream")
STEPS = 20  # of a record, about: what grows with a run is still small
SWITCHED_OFF = ("overlap", "reuse_slots", "deferred_update", "rare_write_backs")
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}


@dataclass(frozen=True)
class Record:
    """One measured case."""

    name: str
    config: Any
    method: str
    tokens: tuple[int, int]
    placement: str
    measured: dict[str, Any]
    gpu_memory: str | None = None
    wire: str | None = None
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)
    clips: bool = False
    link: dict[str, float] | None = None
    micro_batches: int = 1
    moved: tuple[int, int] = (0, 0)


def records(path: Path, everything: bool) -> Iterator[Record]:
    """The records of one file."""
    found = json.loads(path.read_text())
    if path.name.startswith("low_rank"):
        yield from _low_rank(path.stem, found)
    elif path.name.startswith("frozen_base"):
        yield from (_frozen(row) for row in found["rows"] if row["case"] == "lora" and "peft" not in row["name"])
    else:
        for each in found["records"]:
            if "step_s" in each:
                make = _zo if path.name.startswith("zo") else _gradient
                made = make(each, each.get("case") or each["trial"], everything)
                if made is not None:
                    yield replace(made, name=f"{path.stem.split('2026-11-')[1]} {made.name}")


def _measured(each: dict[str, Any]) -> dict[str, Any]:
    return {"gpu": each["device"]["reserved_bytes"], "host": each.get("host_bytes"), "seconds": each["step_s"]}


def _moved(each: dict[str, Any]) -> tuple[int, int]:
    return each["bytes_up"], each["bytes_down"]


def _zo(each: dict[str, Any], case: dict[str, Any], everything: bool) -> Record | None:
    off = [name for name in SWITCHED_OFF if not case.get(name, True)]
    if case["system"] == "textbook" or (off and not everything) or case["dtype"] not in ("bf16", "fp32"):
        return None
    if set(off) & {"overlap", "reuse_slots", "deferred_update"}:
        return None
    options = {"compile": case.get("compiled", False)} | ({"write_back_every": 1} if off else {})
    config = model_config(case["model"], case["length"], case["blocks"])
    return Record(
        each["name"], config, "zo", (case["batch"], case["length"]),
        "resident" if case["system"] == "resident" else "stream", _measured(each), case["gpu_memory"], case["wire"],
        torch.float32 if case["dtype"] == "fp32" else torch.bfloat16, options, link=each.get("link"),
        moved=_moved(each),
    )  # fmt: skip


def _gradient(each: dict[str, Any], trial: dict[str, Any], everything: bool) -> Record | None:
    options = {name: value for name, value in trial["options"].items() if name not in ("svd", "max_grad_norm")}
    method, placement = trial["system"], "stream" if trial["streamed"] else "resident"
    if method == "native":
        method = options.pop("optimizer").lower()
        options = {"native": True}
    return Record(
        trial["name"], llama_config(trial["shape"]), method, (trial["batch"], trial["length"]), placement,
        _measured(each), trial["gpu_memory"], None, torch.bfloat16, options,
        trial["options"].get("max_grad_norm") is not None, each.get("link"), trial.get("micro_batches") or 1,
        _moved(each),
    )  # fmt: skip


def _frozen(row: dict[str, Any]) -> Record:
    from transformers import LlamaConfig

    name = row["name"]
    wire = name.split(",")[0]
    streamed = "streamed in " in name
    options = {"activations": "block" if "twice" in name or streamed else "auto"}
    measured = {"gpu": row["gpu"], "host": row["host"], "seconds": row["step_s"]}
    return Record(
        f"8B lora {name}", LlamaConfig(**LLAMA_8B), "lora", tuple(row["tokens"]), "stream" if streamed else "resident",
        measured, name.split("streamed in ")[1] if streamed else None, None if wire == "bf16" else wire,
        torch.bfloat16, options, moved=_moved(row),
    )  # fmt: skip


def _low_rank(stem: str, found: dict[str, Any]) -> Iterator[Record]:
    asked = found["asked"]
    tokens = int(asked["batch"]), int(asked["length"])
    for name, each in found.items():
        if not isinstance(each, dict) or "step_s" not in each or "textbook" in name or "device" not in each:
            continue
        options = {"rank": int(asked["rank"]), "refresh": int(asked["refresh"])} if "low rank" in name else {}
        if "compiled" in name:
            options["compile"] = True
        placement = "resident" if "resident" in name else "stream"
        wire = "int4" if "int4" in name else None
        if wire and "rank" in options:
            options["fold"] = False
        budget = asked["int4"] if f"in {asked['int4']}" in name else None
        yield Record(
            f"{stem} {name}", model_config(asked["model"]), "zo", tokens, placement, _measured(each), budget,
            wire, torch.bfloat16, options, moved=_moved(each),
        )  # fmt: skip


def plan(record: Record, rates: Rates, modules: dict[str, Any]) -> dict[str, Any]:
    """The planned and measured numbers of a record."""
    traits = METHODS[record.method]
    names = {each.name for each in fields(traits.settings)}
    own: Any = traits.settings(**{name: value for name, value in record.options.items() if name in names})
    if record.method == "zo":  # taken before whole steps were recorded as CUDA graphs
        own = SimpleNamespace(**vars(own), whole_steps=False)
    if record.options.get("native"):  # Hugging Face's own checkpoints of blocks
        own = SimpleNamespace(**vars(own), activations="block")
    if record.link:
        rates = replace(
            rates, **{a: record.link[b] * 1e9 for a, b in (("up", "up"), ("down", "down"), ("both", "duplex"))}
        )
    key = f"{record.config.to_json_string()} {record.dtype}"
    if key not in modules:
        modules[key] = build(record.config, record.dtype)
    module, (batch, length) = modules[key], record.tokens
    budget = int(Bytes.parse(record.gpu_memory)) if record.gpu_memory else None
    limit = budget if budget is not None else int(USABLE * (rates.gpu_bytes or 0))
    asked = Question(
        module, record.dtype, rates, limit, 2**50, batch, length, record.micro_batches, STEPS, record.clips,
        settings={record.method: own}, is_budget=budget is not None,
    )  # fmt: skip
    layout, streamed = asked.find(module), set[int]()
    if record.placement == "stream":
        room = Room(Wire(record.dtype, record.wire), rates.workspace_bytes, limit, budget is not None)
        layout, streamed = fit(module, Costs(asked.workload(traits), room, traits), budget)
    row = make_row(asked, traits, record.placement, record.wire, layout, streamed)
    room = Room(Wire(record.dtype, record.wire), rates.workspace_bytes, limit, budget is not None)
    work = traits.planned_work(layout, streamed, asked.workload(traits), room, rates)
    if record.options.get(
        "native"
    ):  # its AdamW is fused: no copy of all weights; its loss has the logits of all tokens
        logits = 6 * record.dtype.itemsize * batch * length * layout.table.shape[0]
        usual = traits.planned_bytes(layout, streamed, asked.workload(traits), room)
        peak = replace(usual, update=0, logits=logits)
        row = replace(row, gpu_bytes=peak.total)
    seconds = row.seconds
    assert seconds is not None
    return {
        "planned": {"gpu": row.gpu_bytes, "host": row.host_bytes, "seconds": row.step_seconds},
        "measured": record.measured,
        "bound_by": row.bound_by,
        "parts": {"compute": seconds.compute, "link": seconds.link, "cpu": seconds.cpu},
        "link_bytes": {"planned": [work.up, work.down], "measured": list(record.moved)},
    }


def checks(path: Path, modules: dict[str, Any]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases of a run of plan_check.py, planned now, beside what was measured then."""
    found = json.loads(path.read_text())
    host = json.loads((RECORDS / f"{CHECKS[1]}.json").read_text())["rates"]
    known = {} if "called" in found["rates"] else {name: host[name] for name in HOST}
    rates = Rates.from_dict(found["rates"] | known)
    if path.stem == EIGHTH:
        rates = replace(rates, up=rates.down)
    if path.stem == SIXTH:
        _as_usual(found["results"])
    for each in found["results"]:
        case = Case(**(each["case"] | {"tokens": tuple(each["case"]["tokens"])}))
        if path.stem in CHECKS[: CHECKS.index(TWELFTH)] and (case.method, case.placement) == PLACED_OTHERWISE:
            continue
        own = replace(rates, **each.get("host_rates", {}))
        kept = {name: each[name] for name in ("measured", "host_rates") if name in each}
        yield case, dry(case, own, modules) | kept


def _as_usual(results: list[dict[str, Any]]) -> None:
    """The two substitutions in the sixth run (above)."""
    for i, each in enumerate(results):
        if each["case"]["method"] == RISING:
            each["measured"]["seconds"] = statistics.median(each["steps_s"][-2:])
        if each["case"]["method"] == UNUSUAL:
            near = [results[i + k]["host_rates"] for k in (-2, -1, 1, 2)]
            each["host_rates"] = {name: min(rates[name] for rates in near) for name in HOST}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="records; those of the last days if none are named")
    parser.add_argument("--only", default="", help="records whose name contains this")
    parser.add_argument("--all", action="store_true", help="also records with parts switched off")
    parser.add_argument("--moved", action="store_true", help="also bytes over the link")
    parser.add_argument("--checks", action="store_true", help="the runs of plan_check.py, with their own rates")
    args = parser.parse_args()
    rates, modules, results = profile("h200"), {}, []
    if args.checks:
        for path in args.files or [RECORDS / f"{name}.json" for name in CHECKS]:
            print(path.stem)
            results = []
            for case, found in checks(path, modules):
                if args.only in case.name:
                    results.append(found)
                    print(line(case.name, found), flush=True)
            print("\n".join(summary(results)))
        return None
    print("\n".join(rates.lines()))
    for path in args.files or [RECORDS / f"{name}.json" for name in LATEST]:
        for record in records(path, args.all):
            if args.only not in record.name:
                continue
            found = plan(record, rates, modules)
            results.append(found)
            print(line(record.name, found), flush=True)
            if args.moved:
                up, down = zip(*found["link_bytes"].values(), strict=True)
                print(f"    GB up {up[0] / 1e9:.2f} {up[1] / 1e9:.2f}, down {down[0] / 1e9:.2f} {down[1] / 1e9:.2f}")
    print("\n".join(summary(results)))


if __name__ == "__main__":
    sys.exit(main())
