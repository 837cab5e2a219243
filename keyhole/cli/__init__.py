"""The command line: `keyhole VERB ...`. A verb is a function here, and a line in the table below.

    train.py    train, data, plan       pages.py      compare, report, push, demo, config, env
    models.py   eval, chat, replay      bench.py      bench
    arguments.py  what the verbs share: CONFIG, key=value, options with several values

The command line computes nothing: a verb reads its arguments, calls the library and prints. Its imports are inside the
function, so that `keyhole --help` starts without torch. Exit codes:

    0    done
    2    a mistake of the user, or a limit of the machine (memory): one message on stderr, no traceback
    1    a bug in keyhole: a traceback, and a request for the output of `keyhole env`
    130  interrupted, or the reader of the output has gone (training saves first)

Ctrl-C outside of the training loop ends the command at once, during the imports of the large libraries even without an
exception (machine/collector.py). Nothing is lost by that: files are complete before they get their names
(disk/files.py), and during training other handlers are in force (training/signals.py).
"""

import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

import keyhole
from keyhole.cli import bench, models, pages, train
from keyhole.cli.arguments import SettingsCommand
from keyhole.errors import UserError, printable
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.ranks.join import refuse_several
from keyhole.training.signals import EXIT_INTERRUPTED

SOLITARY = ("plan", "data", "eval", "chat", "compare", "replay", "report", "push", "bench", "demo")  # not for ranks
MOST_OF_A_BUG = 100_000  # characters
UsageError: Any = typer.BadParameter.__mro__[1]  # click's class, found through typer

app = typer.Typer(
    help="Full-parameter fine-tuning of language models that do not fit your GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS: dict[Callable[..., None], type[TyperCommand]] = {
    train.train: train.TrainCommand,
    train.plan: SettingsCommand,
    train.data: SettingsCommand,
    models.eval: models.EvalCommand,
    models.chat: SettingsCommand,
    pages.compare: SettingsCommand,
    models.replay: SettingsCommand,
    pages.report: TyperCommand,
    pages.push: TyperCommand,
    pages.env: TyperCommand,
    pages.demo: TyperCommand,
}
for verb, kind in VERBS.items():
    app.command(cls=kind)(verb)
app.add_typer(pages.app, name="config")
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"keyhole {keyhole.__version__}")
        raise typer.Exit()


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_streams()
    warnings.showwarning = _show_warning
    # bf16 on this CPU, tensors that were left out: the start block mentions them
    for message in ("mkldnn_matmul failed", "dtype: this CPU", "weights: "):
        warnings.filterwarnings("ignore", message=message)
    try:
        words = sys.argv[1:] if args is None else args
        if words and words[0] in SOLITARY:
            refuse_several(f"keyhole {words[0]}")
        code = _run(words)
        sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UsageError as error:
        error.show(file=(said := io.StringIO()))
        print(printable(said.getvalue().rstrip()), file=sys.stderr)
        return int(error.exit_code)
    except UserError as error:
        print(f"keyhole: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("keyhole: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `keyhole report out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end
        return EXIT_INTERRUPTED
    except Exception as error:
        if (told := _limit_met(error)) is not None:
            print(f"keyhole: {told}", file=sys.stderr)
            return 2
        ours = "this is our mistake, not yours. Please report it with the text above and the output of `keyhole env`."
        print(f"{printable(traceback.format_exc(), MOST_OF_A_BUG)}\nkeyhole: {ours}", file=sys.stderr)
        return 1


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: Any = None
) -> None:
    """In a line of its own: what the user has typed is no line of a program."""
    text = f"keyhole: warning: {printable(message)}\n"
    sys.stderr.write(text if category is UserWarning else warnings.formatwarning(message, category, filename, lineno))


def _run(words: Sequence[str]) -> int:
    """Runs the verb; returns its exit code. (The `main` of typer's command would turn Ctrl-C and a closed output into
    exit codes without a message.)"""
    command = typer.main.get_command(app)
    if "_KEYHOLE_COMPLETE" in os.environ:  # the shell asks, by the script of --show-completion
        command.main(prog_name="keyhole")
    try:
        with command.make_context("keyhole", list(words), obj=list(words)) as context:
            command.invoke(context)
        return 0
    except typer.Exit as stop:
        return stop.exit_code


def _limit_met(error: Exception) -> str | None:
    """Which limit of the user's shell, files or machine made the command fail, and what to do; None: it is a bug."""
    if isinstance(error, PermissionError) and error.filename:  # even looking for a file may not be allowed
        return f"{printable(error.filename, kept='')}: {error.strerror}; ask for access to it, or name another path"
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current directory was removed; change to another one"
    lacks = out_of_memory(error)
    return None if lacks is None else f"{printable(lacks)}; what was saved before is intact"


def _open_streams() -> None:
    """Replaces closed standard streams by /dev/null: the next file that is opened would get the number of a missing
    one, and a message would be written into it. Makes streams escape characters that the locale lacks."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens the lowest free descriptor: the missing one
    for name in ("stdin", "stdout", "stderr"):
        if vars(sys)[name] is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
