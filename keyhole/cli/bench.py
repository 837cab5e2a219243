"""keyhole bench zo | lomo | lsp | memory | layers | snapshots | scale | lsp-bias [--quick] ..."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.errors import UserError

app = typer.Typer(
    help="Time keyhole on this machine, with the baseline and the floor in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Out = Annotated[str, typer.Option(metavar="DIR", help="Where JSON and Markdown go.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny shapes, on a CPU too: shows that it runs.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of each.")]
WarmUp = Annotated[int, typer.Option(min=1, help="Steps before those.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")]
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Start nothing after this.")]
Table = Annotated[
    str | None, typer.Option(metavar="FILE", help="Your own YAML instead of keyhole/bench/tables/*.yaml.")
]
Only = Annotated[str, typer.Option(metavar="TEXT", help="Only cases with this in their name.")]

STEPS_OF_SHAPES = {
    "lomo.yaml": "LOMO and AdaLOMO on Llama shapes, resident and streamed, beside native SGD and AdamW.",
    "lsp.yaml": "LSP by subspace size, offloaded Adam in both orders, LoRA and GaLore, beside native AdamW.",
}


def _command(context: typer.Context) -> str:
    """The command line that reproduces a report, without unset options."""
    words = ["keyhole", "bench", str(context.info_name)]
    for name in (str(param.name) for param in context.command.params):
        value = context.params.get(name)
        if name not in ("out", "help") and value not in (None, "", False):
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and 0 < int(word) < 10**6 for word in words):
        raise UserError(f"{option}: {text!r} is no list of numbers above 0, such as 16,32")
    return tuple(int(word) for word in words)


def _tables(context: typer.Context, **which: Any) -> None:
    """Runs the file of tables of a verb, and prints them. which: cases and models of it."""
    from keyhole.bench.process import make_job
    from keyhole.bench.run import bench_tables

    said = context.params
    job = make_job(said["device"], said["quick"], said.get("warm_up", 1), said.get("steps", 1), said["time_limit"])
    out, file = Path(said["out"]), Path(said["table"]) if said["table"] else None
    shipped, command = f"{context.info_name}.yaml", _command(context)
    report = bench_tables(shipped, job, out=out, command=command, file=file, say=typer.echo, **which)
    typer.echo("\n" + report.markdown() + "\nwrote " + " and ".join(map(str, report.paths)))
    if differing := report.differing():
        typer.echo(f"keyhole: losses differ where they must not: {', '.join(differing)}", err=True)
        raise typer.Exit(1)


@app.command()
def zo(
    context: typer.Context,
    cases: Annotated[
        str, typer.Option(metavar="NAMES", help="Tables, `all`, or patterns of case names; with commas.")
    ] = "judged",
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Run the tables on these models instead, with commas: 1.3B,BLOOM-176B.")
    ] = "",
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cut models to blocks that fit this; default: what is free.")
    ] = None,
    table: Table = None,
    out: Out = "benchmarks/records",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 6,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Zeroth-order: textbook, resident and streamed steps.

    Tables: judged, sizes, ablation, wire (AMP), batches, compiled, lengths, short, low-rank, budgets, giant, bloom.
    """
    _tables(context, words=_words(cases), models=_words(models), host=host_memory)


def steps_of_shapes(
    context: typer.Context,
    only: Only = "",
    table: Table = None,
    out: Out = "benchmarks/records",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 2,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Steps of methods with gradients: the cases of the table that has the verb's name."""
    _tables(context, only=only)


for _file, _about in STEPS_OF_SHAPES.items():
    app.command(_file.removesuffix(".yaml"), help=_about)(steps_of_shapes)


@app.command()
def memory(
    context: typer.Context,
    only: Only = "",
    table: Table = None,
    out: Out = "benchmarks/records",
    quick: Quick = False,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Weights, gradients, state and activations of a step: AdamW, SGD and LOMO, with and without checkpointing."""
    _tables(context, only=only)


@app.command()
def layers(
    context: typer.Context,
    models: Annotated[str, typer.Option(metavar="NAMES", help="OPT-13B, Llama-7B, ..., with commas.")] = (
        "Llama-7B,GPT2-1.3B"
    ),
    out: Out = "benchmarks/records",
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    length: Annotated[int, typer.Option(min=1, max=2048, help="Tokens of each.")] = 1024,
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 2,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Forward, backward and Adam's update of one block, on the GPU and on the CPU, and what the whole model holds."""
    from keyhole.bench.layers import Layer, LayerReport
    from keyhole.bench.process import make_job, run
    from keyhole.bench.shapes import known

    job = make_job(device, quick, warm_up, steps, time_limit)
    names = [known(name) and name for name in _words(models)]
    places = ("cuda", "cpu") if job.device == "cuda" else ("cpu",)
    report = LayerReport("layers", Path(out), _command(context), quick)
    cases = [Layer(name, place, batch, length) for place in places for name in names]
    run("keyhole.bench.layers:measure_layer", cases, job, report, typer.echo)
    typer.echo("\n" + report.markdown())


@app.command()
def snapshots(
    context: typer.Context,
    sizes: Annotated[str, typer.Option(metavar="NAMES", help="Models, with commas.")] = "1.3B,2.7B,6.7B",
    out: Out = "benchmarks/records",
    scratch: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where checkpoints go meanwhile; default: /tmp or so.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 2048 tokens per step.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    periods: Annotated[int, typer.Option(min=1, help="Checkpoints that are timed.")] = 2,
    replay_steps: Annotated[int, typer.Option(min=0, help="Length of the journal that is replayed.")] = 1000,
    quick: Quick = False,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Zeroth-order steps with a checkpoint every 10, beside none and torch.save, and MeZO in memory with torch.save."""
    from keyhole.bench.process import make_job, run
    from keyhole.bench.snapshots import SnapshotReport, cases_of

    job = make_job(device, quick, 0, 0, time_limit)
    cases = cases_of(_words(sizes), batch, every, periods, replay_steps, scratch)
    report = SnapshotReport("snapshots", Path(out), _command(context), quick)
    run("keyhole.bench.snapshots:measure_saving", cases, job, report, typer.echo)
    typer.echo("\n" + report.markdown())


@app.command()
def scale(
    model: Annotated[str, typer.Option(metavar="SIZE", help="13B and other OPT shapes, or parameters: 7e9.")] = "13B",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, one per GPU.")] = 2048,
    tflops: Annotated[float, typer.Option(help="TFLOP/s that products reach on one GPU.")] = 600.0,
    memory: Annotated[float, typer.Option(help="GB/s of GPU memory.")] = 4000.0,
    pcie: Annotated[float, typer.Option(help="GB/s from host memory to a GPU.")] = 55.0,
    nvlink: Annotated[float, typer.Option(help="GB/s between GPUs of a machine, one way.")] = 300.0,
    network: Annotated[float, typer.Option(help="GB/s of a machine's network, one way.")] = 50.0,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs per machine.")] = 8,
    host: Annotated[float, typer.Option(help="GB/s of a machine's host memory.")] = 200.0,
) -> None:
    """Predict steps on 1 to 64 GPUs, on paper: nothing runs."""
    from keyhole.bench.scale import Machines, table

    rates = {"tflops": tflops, "memory": memory, "pcie": pcie, "nvlink": nvlink, "network": network, "host": host}
    for name, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise UserError(f"--{name}: {rate} is no rate; a number above 0 is needed")
    typer.echo(table(model, tokens, Machines(**rates, gpus=gpus)))


@app.command("lsp-bias")
def lsp_bias(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="DIR", help="Hugging Face directory or hub id.")] = "demo",
    data: Annotated[str, typer.Option(metavar="FILE", help="Training data of any format that `train` reads.")] = "demo",
    d: Annotated[str, typer.Option(metavar="NUMBERS", help="Sizes of the subspace, with commas.")] = "16,32,48",
    r: Annotated[str, typer.Option(metavar="NUMBERS", help="Numbers per row of a projector, with commas.")] = "1,4,16",
    kinds: Annotated[str, typer.Option(metavar="NAMES", help="Kinds of projectors.")] = "free,blocks",
    batch: Annotated[int, typer.Option(min=1, help="Rows per gradient.")] = 16,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows that are differentiated at a time.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row, at most.")] = 128,
    calibration: Annotated[int, typer.Option(min=1, help="Gradients that projectors are fitted to.")] = 4,
    held_out: Annotated[int, typer.Option(min=1, help="Others that they are measured on.")] = 8,
    matrices: Annotated[int, typer.Option(min=0, help="Matrices, spread over the blocks; 0: all of them.")] = 16,
    out: Out = "benchmarks/records",
    quick: Quick = False,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """How much of a gradient LSP's projectors lose, on any model and data, beside GaLore."""
    from keyhole.bench.bias import Sampling, bench_bias
    from keyhole.loading import choose_device

    where = {"batch": batch, "micro_batch": micro_batch, "length": length, "matrices": matrices}
    report = bench_bias(
        Sampling(model, data, **where, calibration=calibration, held_out=held_out, device=choose_device(device).type),
        out=Path(out),
        command=_command(context),
        sizes=(_numbers("--d", d), _numbers("--r", r)),
        kinds=tuple(_words(kinds)),
        quick=quick,
        time_limit_s=time_limit,
        say=typer.echo,
    )
    typer.echo("\n" + report.markdown())
