"""keyhole bench zo | lomo | lsp | snapshots | scale [--quick] ..."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

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
TimeLimit = Annotated[float | None, typer.Option(metavar="SECONDS", help="Start nothing that would end after this.")]
Table = Annotated[
    str | None, typer.Option(metavar="FILE", help="Your own YAML instead of keyhole/bench/tables/*.yaml.")
]


def _command(verb: str, **options: object) -> str:
    """The command line that a report gives to reproduce it, without what is not set."""
    words = ["keyhole", *verb.split()]
    for name, value in options.items():
        if value not in (None, "", False):
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


@app.command()
def zo(
    cases: Annotated[
        str, typer.Option(metavar="NAMES", help="Tables, `all`, or patterns of case names; with commas.")
    ] = "judged",
    table: Table = None,
    out: Out = "benchmarks",
    quick: Quick = False,
    steps: Steps = 5,
    warm_up: WarmUp = 6,
    time_limit: TimeLimit = None,
    device: Device = None,
) -> None:
    """Zeroth-order: textbook, resident and streamed steps.

    Tables: judged, sizes, ablation, wire, batches, compiled, lengths, budgets, giant.
    """
    from keyhole.bench.rows import TABLES
    from keyhole.bench.zo.run import bench_zo

    how = {"cases": cases, "table": table, "steps": steps, "warm_up": warm_up, "quick": quick, "time_limit": time_limit}
    report = bench_zo(
        [word for word in cases.split(",") if word],
        out=Path(out),
        command=_command("bench zo", **how),
        table=Path(table) if table else TABLES / "zo.yaml",
        device=device,
        quick=quick,
        steps=steps,
        warm_up=warm_up,
        time_limit_s=time_limit,
        say=typer.echo,
    )
    typer.echo("\n" + report.summary())
    if differing := report.differing():
        typer.echo(f"keyhole: losses differ where they must not: {', '.join(differing)}", err=True)
        raise typer.Exit(1)


def _first_order(shipped: str, text: str) -> Callable[..., None]:
    """The command that runs a shipped table of trials, or one of the user's own."""

    def command(
        only: Annotated[str, typer.Option(metavar="TEXT", help="Only trials with this in their name.")] = "",
        table: Table = None,
        out: Out = "benchmarks",
        quick: Quick = False,
        steps: Steps = 5,
        warm_up: WarmUp = 2,
        time_limit: TimeLimit = None,
    ) -> None:
        from keyhole.bench.gradient.run import bench_gradient
        from keyhole.bench.rows import TABLES

        how = {"steps": steps, "warm_up": warm_up, "quick": quick, "only": only}
        told = _command(f"bench {Path(shipped).stem}", **how, table=table, time_limit=time_limit)
        path = Path(table) if table else TABLES / shipped
        report = bench_gradient(path, out=Path(out), command=told, time_limit_s=time_limit, say=typer.echo, **how)
        typer.echo("\n" + report.markdown())

    command.__doc__ = text
    return app.command(Path(shipped).stem)(command)


lomo = _first_order(
    "lomo.yaml", "LOMO and AdaLOMO on Llama shapes, resident and streamed, beside native SGD and AdamW."
)
lsp = _first_order(
    "lsp.yaml", "LSP by subspace size, offloaded Adam in both orders, LoRA and GaLore, beside native AdamW."
)


@app.command()
def snapshots(
    sizes: Annotated[str, typer.Option(metavar="NAMES", help="Models, with commas.")] = "1.3B,2.7B,6.7B",
    out: Out = "benchmarks",
    scratch: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where checkpoints go meanwhile; default: /tmp or so.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of 2048 tokens per step.")] = 16,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    periods: Annotated[int, typer.Option(min=1, help="Checkpoints that are timed.")] = 2,
    replay_steps: Annotated[int, typer.Option(min=0, help="Length of the journal that is replayed.")] = 1000,
    quick: Quick = False,
    device: Device = None,
) -> None:
    """Streamed zeroth-order steps with a checkpoint every 10, beside none and torch.save."""
    from keyhole.bench.snapshots.run import bench_snapshots

    how = {"batch": batch, "every": every, "periods": periods, "replay_steps": replay_steps, "quick": quick}
    report = bench_snapshots(
        [size for size in sizes.split(",") if size],
        out=Path(out),
        command=_command("bench snapshots", sizes=sizes, **how),
        scratch=Path(scratch) if scratch else None,
        device=device,
        say=typer.echo,
        **how,
    )
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
) -> None:
    """Predict steps on 1 to 64 GPUs, on paper: nothing runs."""
    from keyhole.bench.scale import Machines, table
    from keyhole.errors import UserError

    rates = {"tflops": tflops, "memory": memory, "pcie": pcie, "nvlink": nvlink, "network": network}
    for name, rate in rates.items():
        if not 0 < rate < float("inf"):
            raise UserError(f"--{name}: {rate} is no rate; a number above 0 is needed")
    typer.echo(table(model, tokens, Machines(**rates, gpus=gpus)))
