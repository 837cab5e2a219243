"""keyhole bench zo | lomo | lsp | memory | layers | snapshots | lsp-bias [--quick] ..."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.arguments import note
from keyhole.disk.files import try_place, writing_to
from keyhole.errors import UserError

app = typer.Typer(
    help="Time keyhole on this machine, beside baselines and floors.", no_args_is_help=True, rich_markup_mode=None
)

Out = Annotated[str, typer.Option("--output-dir", "--out", metavar="DIR", help="Where JSON and Markdown go.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny shapes, on a CPU too: shows that it runs.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")]
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Start nothing after this.")]

ZEROTH = "zo.yaml"
TABLES = {  # what a verb shows, by the file of its cases
    ZEROTH: "Zeroth-order: textbook, resident and streamed steps. Tables: judged (the default), sizes, ablation, wire, "
    "batches, compiled, lengths, short, low-rank, budgets, giant, bloom.",
    "lomo.yaml": "LOMO and AdaLOMO on Llama shapes. Resident and streamed, beside native SGD and AdamW.",
    "lsp.yaml": "LSP and offloaded Adam beside AdamW. By subspace size, in both orders; with LoRA and GaLore.",
    "memory.yaml": "Memory of a step, by what it is. Of AdamW, SGD and LOMO, with and without checkpointing.",
    "layers.yaml": "One block on the GPU and on the CPU. Forward, backward and Adam's update, and what a model holds.",
    "snapshots.yaml": "Zeroth-order steps with checkpoints. One every 10, beside none and torch.save, and MeZO's.",
}


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _announced(output_dir: str, words: list[str]) -> Path:
    """The directory of the results, once it is known that they can be written: measuring takes hours."""
    if any(word.partition("=")[0] == "--out" for word in words):
        note("--out is --output-dir now; the old name is still read")
    with writing_to(path := Path(output_dir)):
        try_place(path)
    note(f"results go to {path}/")
    return path


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and 0 < int(word) < 10**6 for word in words):
        raise UserError(f"{option}: {text!r} is no list of numbers above 0, such as 16,32")
    return tuple(int(word) for word in words)


def tables(
    context: typer.Context,
    cases: Annotated[
        str, typer.Option(metavar="NAMES", help="Tables, `all`, or patterns of case names; with commas.")
    ] = "",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases with this in their name.")] = "",
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Run the tables on these models instead, with commas: 1.3B,BLOOM-176B.")
    ] = "",
    table: Annotated[
        str | None, typer.Option(metavar="FILE", help="Your own YAML instead of keyhole/bench/tables/*.yaml.")
    ] = None,
    output_dir: Out = "bench-out",
    quick: Quick = False,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 5,
    warm_up: Annotated[int | None, typer.Option(min=1, help="Steps before those.")] = None,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """The cases of the table that has the verb's name."""
    out = _announced(output_dir, context.obj)
    from keyhole.bench.process import make_job
    from keyhole.bench.run import bench_tables

    shipped = f"{context.info_name}.yaml"
    job = make_job(device, quick, warm_up or (6 if shipped == ZEROTH else 2), steps, time_limit)
    report = bench_tables(
        shipped,
        job,
        out=out,
        command=shlex.join(["keyhole", *context.obj]),
        file=Path(table) if table else None,
        words=_words(cases) or (["judged"] if shipped == ZEROTH and not table else ["all"]),
        only=only,
        models=_words(models),
        say=typer.echo,
    )
    typer.echo("\n" + report.markdown() + "\nwrote " + " and ".join(map(str, report.paths)))
    if differing := report.differing():
        typer.echo(f"keyhole: losses differ where they must not: {', '.join(differing)}", err=True)
        raise typer.Exit(1)


for _file, _about in TABLES.items():
    app.command(_file.removesuffix(".yaml"), help=_about)(tables)


@app.command("lsp-bias")
def lsp_bias(
    context: typer.Context,
    model: Annotated[str, typer.Option(metavar="DIR", help="Hugging Face directory or hub id.")] = "demo",
    data: Annotated[str, typer.Option(metavar="FILE", help="Training data of any format that `train` reads.")] = "demo",
    d: Annotated[str, typer.Option(metavar="NUMBERS", help="Sizes of the subspace, with commas.")] = "16,32,48",
    r: Annotated[str, typer.Option(metavar="NUMBERS", help="Numbers per row of a projector, with commas.")] = "1,4,16",
    kinds: Annotated[str, typer.Option(metavar="NAMES", help="Kinds of projectors.")] = "free,blocks",
    batch: Annotated[int, typer.Option(min=1, help="Rows per gradient.")] = 16,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row, at most.")] = 128,
    calibration: Annotated[int, typer.Option(min=1, help="Gradients that projectors are fitted to.")] = 4,
    held_out: Annotated[int, typer.Option(min=1, help="Others that they are measured on.")] = 8,
    matrices: Annotated[int, typer.Option(min=0, help="Matrices, spread over the blocks; 0: all of them.")] = 16,
    output_dir: Out = "bench-out",
    quick: Quick = False,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """How much of a gradient LSP's projectors lose.

    On any model and data, beside GaLore.
    """
    out = _announced(output_dir, context.obj)
    from keyhole.bench.bias import Sampling, bench_bias
    from keyhole.loading import choose_device

    where = {"batch": batch, "length": length, "matrices": matrices}
    report = bench_bias(
        Sampling(model, data, **where, calibration=calibration, held_out=held_out, device=choose_device(device).type),
        out=out,
        command=shlex.join(["keyhole", *context.obj]),
        sizes=(_numbers("--d", d), _numbers("--r", r)),
        kinds=tuple(_words(kinds)),
        quick=quick,
        time_limit_s=time_limit,
        say=typer.echo,
    )
    typer.echo("\n" + report.markdown())
