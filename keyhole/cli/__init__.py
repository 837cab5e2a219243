"""The command line: `keyhole VERB ...`. A verb is a file here, and a line in the table below.

The command line computes nothing: a verb reads its arguments, calls the library and prints. What a verb needs
is imported inside it, so that `keyhole --help` starts without torch. Exit codes:

    0    done
    2    the user's mistake: one message on stderr, no traceback
    1    our mistake: a traceback, and a request for the output of `keyhole env`
    130  interrupted (training saves first)
"""

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
from keyhole.errors import UserError
from keyhole.machine.text import printable_lines
from keyhole.ranks.join import refuse_several
from keyhole.training.display import open_missing_streams

SOLITARY = ("plan", "data", "eval", "chat", "compare", "replay", "report", "push", "bench", "demo")  # not for ranks
UsageError = typer.BadParameter.__mro__[1]  # click's, wherever typer keeps it

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
    for message in ("mkldnn_matmul failed", "dtype: this CPU"):  # bf16 on this CPU: the start block says it
        warnings.filterwarnings("ignore", message=message)
    try:
        words = sys.argv[1:] if args is None else args
        if words and words[0] in SOLITARY:
            refuse_several(f"keyhole {words[0]}")
        with _clean_logs():
            code = typer.main.get_command(app).main(args=args, prog_name="keyhole", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except UsageError as error:
        error.show(file=(said := io.StringIO()))
        print(printable_lines(said.getvalue().rstrip()), file=sys.stderr)
        return error.exit_code
    except UserError as error:
        print(f"keyhole: {printable_lines(error)}", file=sys.stderr)
        return getattr(error, "code", 2)
    except KeyboardInterrupt:
        print("keyhole: interrupted", file=sys.stderr)
        return 130
    except Exception:
        print(printable_lines(traceback.format_exc()), file=sys.stderr)
        print(
            "keyhole: this is our mistake, not yours. Please report it with the text above and the output of "
            "`keyhole env`.",
            file=sys.stderr,
        )
        return 1


@contextmanager
def _clean_logs() -> Iterator[None]:
    """What libraries log or warn of may come from a file too (a key of a config, a name)."""
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
    """A stream that the caller has closed is one that nobody reads; a character that the locale lacks is escaped."""
    open_missing_streams()
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
        elif name == "stdout" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
