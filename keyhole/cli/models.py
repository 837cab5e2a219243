"""What takes the directory of a model, and settings of its placement:

keyhole eval DIR --tasks NAME ... | --harness TASK ... [key=value ...] [--task-data DIR] [--limit N] [--json FILE]
keyhole chat DIR [key=value ...] [--system TEXT] [--plain] [--max-new-tokens N]
keyhole replay BASE JOURNAL OUT [--steps N] [key=value ...]
"""

from pathlib import Path
from typing import Annotated

import typer

from keyhole.checkpoint.journal import check_journal, check_out
from keyhole.cli.arguments import (
    AllowCode,
    ModelArgument,
    PlacementSettings,
    SettingsCommand,
    check_model,
    note,
    parse_placement,
    repeat_option,
)
from keyhole.config.loader import parse_settings
from keyhole.errors import UserError
from keyhole.machine.collector import imports

OF_TASKS = ("num_eval", "task_data", "task_splits", "columns", "prompt", "completion")


class EvalCommand(SettingsCommand):
    """`--tasks` and `--harness` take all the arguments that follow."""

    def rewrite(self, args: list[str]) -> list[str]:
        return repeat_option(repeat_option(args, "--tasks"), "--harness")


def eval(
    directory: ModelArgument,
    overrides: PlacementSettings = None,
    tasks: Annotated[
        list[str] | None, typer.Option(metavar="NAME...", help="Tasks by name (sst2,rte), task or data files, demo.")
    ] = None,
    harness: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME...", help="Tasks of lm-evaluation-harness (hellaswag), or their .yaml files."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only N rows of each file.")] = None,
    task_data: Annotated[
        str | None, typer.Option("--task-data", metavar="DIR", help="Directory with a folder of files for each task.")
    ] = None,
    allow_code_execution: AllowCode = False,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", min=0, metavar="N", help="With --harness: examples before a question."),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option("--include-path", metavar="DIR", help="With --harness: a directory of your own tasks.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="With --harness: ask in the model's chat format.")
    ] = False,
    json_path: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too.")] = None,
) -> None:
    """Score a model: validation loss, public tasks, harness tasks.

    Tasks are scored by log-likelihood; those of --harness by lm-evaluation-harness.

    Example: keyhole eval out --tasks sst2,rte held-out.jsonl --task-data data gpu_memory=8GiB
    """
    if tasks is None and harness is None and (named := [word for word in overrides or () if "=" not in word]):
        raise UserError(f"`{' '.join(named)}`: write --tasks before names of tasks and files")
    names = tasks if harness is None else harness
    if names is None or not (tasks is None or harness is None) or not all(map(str.strip, names)):  # "$UNSET"
        raise UserError("--tasks or --harness: give one of them, and the names of tasks behind it")
    used: dict[str, object] = {"task_data": task_data, "allow_code_execution": allow_code_execution or None}
    other: dict[str, object] = {"num_fewshot": num_fewshot, "include_path": include_path}
    other |= {"apply_chat_template": apply_chat_template or None}
    if harness is not None:
        used, other = other, used
    for key in (key for key, value in other.items() if value is not None):
        where = "--tasks" if harness is None else "--harness"
        raise UserError(f"--{key.replace('_', '-')}: not used with {where}; leave it out")
    settings = parse_placement(overrides, "max_length", *(OF_TASKS if harness is None else ()))
    settings |= {key: value for key, value in used.items() if value is not None}
    check_model(directory)
    if harness is not None:
        with imports():
            from keyhole.harness.run import run_harness

        typer.echo(run_harness(directory, names, limit=limit, json_path=json_path, say=note, **settings))
        return
    from keyhole.eval.asked import asked_names

    asked_names(names, settings.get("task_data"), settings.get("task_splits"), json_path)
    with imports():
        from keyhole.eval.evaluate import evaluate as run

    typer.echo(run(directory, names, limit=limit, json_path=json_path, **settings))


def chat(
    directory: ModelArgument,
    overrides: PlacementSettings = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue each text as it stands, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Longest answer in tokens.")] = None,
) -> None:
    """Talk to a model, also to one that is larger than the GPU.

    Example: keyhole chat out gpu_memory=8GiB
    """
    settings = parse_placement(overrides)
    check_model(directory)
    with imports():
        from keyhole.eval.conversation import chat as run

    run(directory, system=system, max_new_tokens=max_new_tokens, plain=plain, **settings)


def replay(
    base: Annotated[str, typer.Argument(metavar="BASE", help="The model that the run started from, or demo.")],
    journal: Annotated[str, typer.Argument(metavar="JOURNAL", help="The run's output_dir, or its run/journal.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new directory for the rebuilt model.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings: device, placement, gpu_memory.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rebuild the weights after N steps; default: all.")
    ] = None,
) -> None:
    """Rebuild a zeroth-order run's weights from its journal.

    Example: keyhole replay facebook/opt-1.3b out/run/journal rebuilt device=cpu
    """
    where = parse_settings(overrides or (), ("device", "placement", "gpu_memory"))
    check_journal(Path(journal))
    check_out(Path(out))
    with imports():
        from keyhole.checkpoint.replay import replay as run

    done = run(base, Path(journal), Path(out), steps=steps, say=typer.echo, **where)
    where_to = f"{out}, and its adapters in {beside}: load both" if (beside := Path(out) / "adapter").is_dir() else out
    typer.echo(f"{done.steps} steps replayed in {done.seconds:.1f} s ({done.total_seconds:.1f} s in all): {where_to}")
