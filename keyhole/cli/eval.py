"""keyhole eval DIR --tasks NAME ... | --harness TASK ... [key=value ...] [--task-data DIR] [--limit N] [--json FILE]"""

from typing import Annotated, Any

import typer

from keyhole.cli.arguments import (
    ModelArgument,
    PlacementSettings,
    SettingsCommand,
    check_model,
    note,
    parse_placement,
    repeat_option,
)
from keyhole.errors import UserError
from keyhole.machine.collector import imports

OF_ROWS = ("columns", "prompt", "completion")  # how rows of data files are read


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
    allow_code: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval).")
    ] = False,
    num_fewshot: Annotated[
        int | None,
        typer.Option("--num-fewshot", min=0, metavar="N", help="With --harness: examples before a question."),
    ] = None,
    include_path: Annotated[
        str | None, typer.Option("--include-path", metavar="DIR", help="With --harness: a directory of your own tasks.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--apply-chat-template", help="With --harness: ask in the model's chat format.")
    ] = False,
    json_path: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too.")] = None,
) -> None:
    """Score a model: validation loss, tasks by log-likelihood, tasks of lm-evaluation-harness.

    Example: keyhole eval out --tasks sst2,rte held-out.jsonl --task-data data gpu_memory=8GiB
    """
    if tasks is None and harness is None and (named := [word for word in overrides or () if "=" not in word]):
        raise UserError(f"`{' '.join(named)}`: write --tasks before names of tasks and files")
    empty = not all(name.strip() for name in (*(tasks or ()), *(harness or ())))  # `--tasks "$UNSET"`
    if (tasks is None) == (harness is None) or empty:
        raise UserError("--tasks or --harness: give one of them, and the names of tasks behind it")
    theirs = {"--num-fewshot": num_fewshot, "--include-path": include_path, "--apply-chat-template": chat or None}
    ours = {"--task-data": task_data, "--allow-code-execution": allow_code or None}
    for option, value in (ours if tasks is None else theirs).items():
        if value is not None:
            raise UserError(f"{option}: not used with {'--harness' if tasks is None else '--tasks'}; leave it out")
    if harness is not None:
        settings = parse_placement(overrides, "max_length", "wire")
        check_model(directory)
        with imports():
            from keyhole.harness.run import run_harness

        options: dict[str, Any]
        options = {"num_fewshot": num_fewshot, "include_path": include_path, "apply_chat_template": chat}
        typer.echo(run_harness(directory, harness, limit=limit, json_path=json_path, say=note, **options, **settings))
        return
    settings = parse_placement(overrides, "max_length", "num_eval", "task_data", "task_splits", *OF_ROWS)
    settings |= {"task_data": task_data} if task_data is not None else {}
    settings |= {"allow_code_execution": True} if allow_code else {}
    assert tasks is not None  # or harness, above
    check_model(directory)
    from keyhole.eval.asked import asked_names

    asked_names(tasks, settings.get("task_data"), settings.get("task_splits"), json_path)
    with imports():
        from keyhole.eval.evaluate import evaluate as run

    typer.echo(run(directory, tasks, limit=limit, json_path=json_path, **settings))
