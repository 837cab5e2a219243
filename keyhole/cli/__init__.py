"""The command line: `keyhole VERB ...`. A verb is a file here, and a line in the table below.

The command line computes nothing: a verb reads its arguments, calls the library and prints. Its imports are inside the
function, so that `keyhole --help` starts without torch. Exit codes:

    0    done
    2    a mistake of the user, or a limit of the machine (memory): one message on stderr, no traceback
    1    a bug in keyhole: a traceback, and a request for the output of `keyhole env`
    130  interrupted, or the reader of the output has gone (training saves first)
"""

import errno
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

import keyhole
from keyhole.cli import arguments, bench, chat, compare, config, data, demo, env, plan, push, replay, report, train
from keyhole.cli import eval as eval_
from keyhole.cli.ctrl_c import safe_imports
from keyhole.errors import UserError
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.text import printable, printable_lines
from keyhole.ranks.join import refuse_several
from keyhole.training.display import open_missing_streams
from keyhole.training.signals import EXIT_INTERRUPTED

SOLITARY = ("plan", "data", "eval", "chat", "compare", "replay", "report", "push", "bench", "demo")  # not for ranks
UsageError: Any = typer.BadParameter.__mro__[1]  # click's class, found through typer

app = typer.Typer(
    help="Full-parameter fine-tuning of language models that do not fit your GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=train.TrainCommand)(train.train)
app.command(cls=arguments.SettingsCommand)(plan.plan)
app.command(cls=arguments.SettingsCommand)(data.data)
app.command(cls=eval_.EvalCommand)(eval_.eval)
app.command(cls=arguments.SettingsCommand)(chat.chat)
app.command(cls=arguments.SettingsCommand)(compare.compare)
app.command(cls=arguments.SettingsCommand)(replay.replay)
app.command()(report.report)
app.command()(push.push)
app.command()(env.env)
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")
app.command()(demo.demo)


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"keyhole {keyhole.__version__}")
        raise typer.Exit()


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    _open_streams()
    for message in ("mkldnn_matmul failed", "dtype: this CPU"):  # bf16 on this CPU: the start block mentions it
        warnings.filterwarnings("ignore", message=message)
    try:
        words = sys.argv[1:] if args is None else args
        if words and words[0] in SOLITARY:
            refuse_several(f"keyhole {words[0]}")
        with _clean_logs(), safe_imports():
            code = _run(words)
            sys.stdout.flush()
        return code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UsageError as error:
        error.show(file=(said := io.StringIO()))
        print(printable_lines(said.getvalue().rstrip()), file=sys.stderr)
        return int(error.exit_code)
    except UserError as error:
        print(f"keyhole: {printable_lines(error)}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:
        print("keyhole: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `keyhole report out | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at the end
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, PermissionError) and error.filename:  # even looking for a file may not be allowed
            told = f"{printable(error.filename)}: {error.strerror}; ask for access to it, or name another path"
            print(f"keyhole: {told}", file=sys.stderr)
            return 2
        if isinstance(error, FileNotFoundError) and _lacks_current_directory():
            print("keyhole: the current directory was removed; change to another one", file=sys.stderr)
            return 2
        if (lacks := out_of_memory(error)) is not None:
            print(f"keyhole: {printable_lines(lacks)}; what was saved before is intact", file=sys.stderr)
            return 2
        if (limit := _limit_met(error)) is not None:
            told = f"{limit} ({printable(f'{type(error).__name__}: {error}', 300)})"
            print(f"keyhole: {told}; what was saved before is intact", file=sys.stderr)
            return 2
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
        print(
            "keyhole: this is our mistake, not yours. Please report it with the text above and the output of "
            "`keyhole env`.",
            file=sys.stderr,
        )
        return 1


def _run(words: Sequence[str]) -> int:
    """Runs the verb; returns its exit code. (The `main` of typer's command would turn Ctrl-C and a closed output into
    exit codes without a message.)"""
    command = typer.main.get_command(app)
    try:
        with command.make_context("keyhole", list(words)) as context:
            command.invoke(context)
        return 0
    except typer.Exit as stop:
        return stop.exit_code


def _lacks_current_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _limit_met(error: BaseException | None) -> str | None:
    """Which limit of the user's shell or of the machine made the process fail, and what to do; None if none did."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return "too many files are open: raise `ulimit -n`"
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return "the system allows no more threads: raise `ulimit -u` and `ulimit -v`, or the container's limits"
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def _clean_logs() -> Iterator[None]:
    """Escapes control characters in log lines and warnings of libraries, which may quote text from files."""
    make, form = logging.getLogRecordFactory(), warnings.formatwarning

    def clean(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.msg, record.args = printable_lines(record.getMessage()), ()
        return record

    logging.setLogRecordFactory(clean)
    warnings.formatwarning = lambda *args, **kwargs: printable_lines(form(*args, **kwargs))
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.formatwarning = form


def _open_streams() -> None:
    """Replaces closed standard streams by /dev/null; makes streams escape characters that the locale lacks."""
    open_missing_streams()
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
