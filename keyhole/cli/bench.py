"""keyhole bench zo | lomo | lsp | snapshots [--quick] ..."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Time keyhole on this machine, with the baseline and the floor in the same run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


Only = Annotated[str, typer.Option(metavar="TEXT", help="Only trials with this in their name.")]
Out = Annotated[str, typer.Option(metavar="DIR", help="Where JSON and Markdown go.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny shapes, on a CPU too: shows that it runs.")]
Steps = Annotated[int, typer.Option(min=1, help="Timed steps of each.")]
WarmUp = Annotated[int, typer.Option(min=1, help="Steps before those.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU where there is one.")]
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Start no trial after this.")]


def _gradient(table: str, only: str, out: str, quick: bool, steps: int, warm_up: int, time_limit: float | None) -> None:
    from keyhole.bench.gradient import bench_gradient

    command = f"keyhole bench {table} --steps {steps} --warm-up {warm_up}"
    command += f" --only '{only}'" if only else ""
    options = {"only": only, "quick": quick, "steps": steps, "warm_up": warm_up, "time_limit_s": time_limit}
    typer.echo("\n" + bench_gradient(table, out=Path(out), command=command, say=typer.echo, **options))


@app.command()
def lomo(
    only: Only = "",
    out: Out = "benchmarks",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 2,
    time_limit: TimeLimit = None,
) -> None:
    """LOMO and AdaLOMO on Llama shapes: native SGD and AdamW, resident and streamed."""
    _gradient("lomo", only, out, quick, steps, warm_up, time_limit)


@app.command()
def lsp(
    only: Only = "",
    out: Out = "benchmarks",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 2,
    bias: Annotated[
        bool, typer.Option("--bias", help="Instead: how well projectors hold on unseen gradients (CPU, minutes).")
    ] = False,
    time_limit: TimeLimit = None,
) -> None:
    """LSP by subspace size, offloaded Adam in both orders, LoRA and GaLore, beside native AdamW."""
    if not bias:
        return _gradient("lsp", only, out, quick, steps, warm_up, time_limit)
    from keyhole.bench.lsp_bias import bench_bias

    typer.echo("\n" + bench_bias(out=Path(out), quick=quick, say=typer.echo))


@app.command()
def zo(
    cases: Annotated[
        str, typer.Option(metavar="NAMES", help="Tables, `all`, or patterns of case names; with commas.")
    ] = "judged",
    out: Out = "benchmarks",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 6,
    time_limit: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Start no case that would end after this.")
    ] = None,
    timeline: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the trace of one streamed step (Perfetto).")
    ] = None,
    device: Device = None,
) -> None:
    """Zeroth-order: textbook, resident and streamed steps.

    Tables: judged, sizes, ablation, wire, batches, compiled, lengths, budgets, giant.
    """
    from keyhole.bench.runner import bench_zo

    words = [word for word in cases.split(",") if word]
    command = f"keyhole bench zo --cases {cases} --steps {steps} --warm-up {warm_up}"
    command += " --quick" if quick else ""
    command += f" --time-limit {time_limit:g}" if time_limit is not None else ""
    report = bench_zo(
        words,
        out=Path(out),
        command=command,
        device=device,
        quick=quick,
        steps=steps,
        warm_up=warm_up,
        time_limit_s=time_limit,
        timeline=Path(timeline) if timeline else None,
        say=typer.echo,
    )
    typer.echo("\n" + report.summary())
    if differing := report.differing():
        typer.echo(f"keyhole: losses differ where they must not: {', '.join(differing)}", err=True)
        raise typer.Exit(1)


@app.command()
def snapshots(
    sizes: Annotated[str, typer.Option(metavar="NAMES", help="Models, with commas.")] = "1.3B,2.7B,6.7B",
    out: Out = "benchmarks",
    scratch: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where checkpoints go meanwhile; default: /tmp or so.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 2048 tokens a step.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    periods: Annotated[int, typer.Option(min=1, help="Checkpoints that are timed.")] = 2,
    replay_steps: Annotated[int, typer.Option(min=0, help="Length of the journal that is replayed.")] = 1000,
    quick: Quick = False,
    device: Device = None,
) -> None:
    """Streamed zeroth-order steps with a checkpoint every 10, beside none and torch.save."""
    from keyhole.bench.snapshots import bench_snapshots

    report = bench_snapshots(
        [size for size in sizes.split(",") if size],
        out=Path(out),
        scratch=Path(scratch) if scratch else None,
        batch=batch,
        every=every,
        periods=periods,
        replay_steps=replay_steps,
        device=device,
        quick=quick,
        say=typer.echo,
    )
    typer.echo(f"\n{report.read_text()}")
