"""The command as a whole: a frozen surface, exit codes that mean something, a start without torch."""

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer

import keyhole.cli
from keyhole.cli import app, main
from keyhole.errors import UserError, warn
from tests.matrix import in_every_run

ROOT = Path(keyhole.cli.__file__).parents[2]
SURFACE_TEXT = """
: --version --install-completion --show-completion
train: CONFIG KEY=VALUE --resume --dry-run --allow-code-execution
plan: KEY=VALUE MODEL|CONFIG --gpu --ram --link --tokens --steps --machine --measure --json
data: CONFIG KEY=VALUE -n --count
eval: KEY=VALUE --allow-code-execution --json DIR --tasks --limit --task-data --harness --num-fewshot
    --include-path --apply-chat-template
compare: KEY=VALUE --dry-run --allow-code-execution [FILE] --retry
chat: KEY=VALUE DIR --system --plain --max-new-tokens
replay: KEY=VALUE --steps BASE JOURNAL OUT
report: DIR... -o --output
push: --dry-run DIR ID --private
env: --json
demo: --output-dir
bench:
bench lsp-bias: --output-dir --out --quick --time-limit --device --model --batch --length --data --d --r --kinds
    --calibration --held-out --matrices
config:
config ls:
config cp: NAME DEST
config show: KEY=VALUE [CONFIG]
"""
SURFACE = {
    verb.strip(): set(words.split())
    for verb, _, words in (line.partition(":") for line in SURFACE_TEXT.replace("\n    ", " ").strip().split("\n"))
}
BENCH = set(
    "--cases --only --models --table --output-dir --out --quick --steps --warm-up --time-limit --device".split()
)
SURFACE |= {f"bench {verb}": BENCH for verb in ("zo", "lomo", "lsp", "memory", "layers", "snapshots")}


def surface_of(command: Any, name: str = "") -> dict[str, set[str]]:
    """Verb -> its arguments and options, help aside."""
    words: set[str] = set()
    for param in command.params:
        words |= set(param.opts) if param.param_type_name == "option" else {param.metavar}
    found = {name: words - {"--help", "-h"}}
    for verb, inner in getattr(command, "commands", {}).items():
        found |= surface_of(inner, f"{name} {verb}".strip())
    return found


def test_the_surface_is_frozen() -> None:
    """A new verb or option must be added here too, on purpose; a setting belongs into the config instead."""
    assert surface_of(typer.main.get_command(app)) == SURFACE


@pytest.mark.parametrize("verb", [[], ["config"], ["bench"]])
def test_a_summary_fits_a_line(verb: list[str], monkeypatch: Any, capsys: Any) -> None:
    """Of 80 columns, with its last word."""
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*verb, "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("keyhole tr", {"train"}),
        ("keyhole train my.yaml --lr 3 --res", {"--resume"}),
        ("keyhole train my.yaml learning_r", {"learning_rate="}),
    ],
)
def test_the_shell_completes_a_line(line: str, offers: set[str], monkeypatch: Any, capsys: Any) -> None:
    """Verbs, options, settings; what is wrong before the cursor is no error yet."""
    for name, value in (("_KEYHOLE_COMPLETE", "complete_bash"), ("COMP_WORDS", line), ("COMP_CWORD", line.count(" "))):
        monkeypatch.setenv(name, str(value))
    assert main([]) == 0
    assert {*capsys.readouterr().out.split()} == offers


def test_our_error_keeps_its_traceback_and_asks_for_env(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("keyhole.machine.probe.environment", lambda **_: 1 / 0)
    assert main(["env"]) == 1
    message = capsys.readouterr().err
    assert "ZeroDivisionError" in message and "Traceback" in message and "keyhole env" in message


def test_a_path_that_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A directory of somebody else, as on a shared machine: one message, whichever verb looks into it."""
    real, locked = os.stat, str(tmp_path / "locked")

    def stat(path: Any, *args: Any, **how: Any) -> os.stat_result:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(locked):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return real(path, *args, **how)

    monkeypatch.setattr(os, "stat", stat)
    assert main(["compare", f"{locked}/a.yaml"]) == 2
    message = capsys.readouterr().err
    assert f"{locked}/a.yaml: Permission denied" in message and "Traceback" not in message


def test_limits_of_the_shell_are_named(monkeypatch: Any, capsys: Any) -> None:
    """Also where a library has wrapped the error in one of its own."""

    def fail(**_: Any) -> None:
        raise ValueError("a library failed") from OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("keyhole.machine.probe.environment", fail)
    assert main(["env"]) == 2
    message = capsys.readouterr().err
    assert "raise `ulimit -n`" in message and "Traceback" not in message


@pytest.mark.parametrize(("raised", "code"), [(KeyboardInterrupt(), 130), (UserError("bad"), 2), (SystemExit(7), 7)])
def test_exceptions_become_exit_codes(monkeypatch: Any, raised: BaseException, code: int) -> None:

    def fail(**_: Any) -> None:
        raise raised

    monkeypatch.setattr("keyhole.machine.probe.environment", fail)
    assert main(["env"]) == code


@pytest.mark.parametrize("args", [["trian"], ["train"], ["train", "demo-zo", "--nonsense"], ["env", "extra"]])
def test_bad_usage_is_exit_2(args: list[str], capsys: Any) -> None:
    """Unknown verbs and options and missing arguments are the user's mistake."""
    assert main(args) == 2
    assert "Traceback" not in capsys.readouterr().err


ESCAPE = "\x1b]0;owned\x07\x1b[2J"


def test_escapes_from_files_do_not_reach_the_terminal(tmp_path: Path, capsys: Any) -> None:
    """A key, a file name and an argument with escape sequences are shown as text, and a huge one is cut."""
    config = tmp_path / f"bad{ESCAPE}.yaml"
    config.write_text(f'"{ESCAPE.encode("unicode_escape").decode()}": 3\n' + "".join(f"k{i}: 1\n" for i in range(5000)))
    for args in (["train", str(config)], ["train", f"none{ESCAPE}"], ["train", "demo-zo", f"{ESCAPE}=1"]):
        assert main(args) == 2
        message = capsys.readouterr().err
        assert "\x1b" not in message and "\x07" not in message and "\\x1b" in message
        assert len(message) < 30_000


@in_every_run(lambda closed: closed in ("2>&-", "<&- >&- 2>&-"))
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_and_a_plain_locale_end_well(closed: str) -> None:
    """A daemon or a cron job may have no stdin, stdout or stderr, and a C locale: the exit code is still right."""
    python = f"{sys.executable} -m keyhole"
    for words, code in (("config show demo-zo", 0), ("train none.yaml", 2)):
        environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(f"{python} {words} {closed}", shell=True, env=environment, timeout=60, check=False)
        assert done.returncode == code


def test_a_removed_current_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell may stand in one; the error was a traceback."""
    here = tmp_path / "gone"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    words = ["model=demo", "method=lomo", "train_data=demo", "output_dir=out", "max_steps=1"]
    assert main(["train", *words]) == 2
    assert "the current directory was removed" in capsys.readouterr().err


def test_a_warning_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Without a path and a line of code, which are not the user's."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(keyhole.cli, "_run", lambda words: warn("a folder was left out") or 0)
    assert main(["env"]) == 0
    assert capsys.readouterr().err == "keyhole: warning: a folder was left out\n"
