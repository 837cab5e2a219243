"""Arguments that typer does not support: settings (`key=value`), and options with an optional value or several values.

A setting is a separate argument, `learning_rate=1e-5`; an option starts with dashes. A setting that is written
as an option (`--learning_rate 1e-5`, as in other trainers) is refused with the argument to write instead.
`--resume` takes an optional path, and `--tasks` takes all arguments that follow. typer expects exactly one value per
option, so these arguments are rewritten before typer parses them.
"""

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from keyhole import assets
from keyhole.config.faults import ELSEWHERE, suggest_key
from keyhole.config.fields import settings
from keyhole.config.loader import load_config, parse_settings
from keyhole.config.recipes import config_of_settings, find_config, is_override, is_setting, recipes, split_words
from keyhole.config.schema import TrainConfig
from keyhole.errors import UserError
from keyhole.machine.text import printable
from keyhole.model.structure.source import check_directory
from keyhole.ranks.join import follows

CHECKPOINT = re.compile(r"checkpoint-\d+")


def complete_setting(incomplete: str) -> list[str]:
    """For the shell: what a setting may be called, and the recipes; where nothing fits it completes files."""
    return [word for word in (*recipes(), *(f"{key}=" for key in settings())) if word.startswith(incomplete or " ")]


ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        autocompletion=complete_setting,
        help="YAML file, or the name of a shipped recipe; settings alone do, too: model=DIR method=...",
    ),
]
ModelArgument = Annotated[str, typer.Argument(metavar="DIR", help="Model directory, hub id, or demo.")]
PlacementSettings = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings: device, dtype, wire, placement, gpu_memory.")
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code-execution", help="Run programs that the model writes (humaneval), confined.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=complete_setting,
        help="Settings that replace those of the file; zo.eps=1e-3.",
    ),
]


def note(text: str) -> None:
    """Prints a line on stderr, because it is not part of the command's result."""
    if not follows():
        print(f"keyhole: {printable(text)}", file=sys.stderr)


def load_settings(config: str, overrides: list[str] | None, stand_ins: dict[str, object] | None = None) -> TrainConfig:
    """The resolved config, with a note when it is a shipped recipe and one for every warning. Where only settings were
    typed, they are the config; stand_ins: values of what this command does not look at then."""
    named, words = split_words([config, *(overrides or ())])
    if named is None:
        resolved, warnings = config_of_settings(words, stand_ins)
    else:
        path, is_recipe = find_config(named)
        if is_recipe:
            note(f"{named} is a shipped recipe: {path}")
        resolved, warnings = load_config(path, words)
    for warning in warnings:
        note(f"warning: {warning}")
    return resolved


def parse_placement(words: list[str] | None, *more: str) -> dict[str, Any]:
    """The settings of a command that loads a model without a config, as typed values."""
    return parse_settings(words or (), ("device", "dtype", "wire", "placement", "gpu_memory", *more))


def check_model(model: str) -> None:
    """Refuses an argument that is neither a model directory nor a hub id, before torch is imported."""
    check_directory(assets.locate(os.path.expanduser(model), assets.MODEL))


def refuse_other_style(args: list[str], options: set[str]) -> None:
    """Raises UserError at the first `--setting` or `option=value`, with the argument to write instead."""
    for position, word in enumerate(args):
        if word == "--":
            return
        name, equals, value = word.partition("=")
        option = "--" + name.replace("_", "-")
        if equals and option in options and not is_override(word):
            raise UserError(f"`{word}`: an option here, write {option} {value or '...'}")
        if not name.startswith("--") or name in options:
            continue
        key = name.removeprefix("--").replace("-", "_")
        key = ELSEWHERE.get(key, key)
        if not equals and position + 1 < len(args) and not args[position + 1].startswith("-"):
            value, word = args[position + 1], f"{word} {args[position + 1]}"
        if key in settings():
            raise UserError(f"`{word}`: settings have no dashes, write {key}={value or '...'}")
        if suggest_key(key).startswith("; did you mean"):
            raise UserError(f"`{word}`: no such option; settings are key=value{suggest_key(key)}")


def with_resume_value(args: list[str], if_alone: str) -> list[str]:
    """`--resume` followed by a path keeps it; alone it gets `if_alone`. If only one argument can be CONFIG, it is
    CONFIG, unless it is a directory or named like a checkpoint, also one that does not exist."""
    words = []
    for position, word in enumerate(args):
        words.append(word)
        if word == "--resume":
            after, others = (args[position + 1 :] or ["--"])[0], args[:position] + args[position + 2 :]
            config_elsewhere = not all(other.startswith("-") or is_setting(other) for other in others)
            a_path = config_elsewhere or os.path.isdir(after) or CHECKPOINT.fullmatch(os.path.basename(after))
            if after.startswith("-") or is_override(after) or not a_path:
                words.append(if_alone)
    return words


def repeat_option(args: list[str], option: str) -> list[str]:
    """`--tasks a b c` becomes `--tasks a --tasks b --tasks c`; a setting ends the list."""
    words, inside, begun = [], False, False
    for word in args:
        if word.startswith("-") or is_override(word):
            inside, begun = word == option, False
        elif inside and begun:
            words.append(option)
        words.append(word)
        begun = begun or (inside and not word.startswith("-"))
    return words


class SettingsCommand(TyperCommand):
    """A verb that takes key=value arguments; a setting written as an option is refused."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {option for param in self.get_params(ctx) for option in param.opts}
        if not ctx.resilient_parsing:  # else the shell completes a line that is not finished
            refuse_other_style(args, options)
        return super().parse_args(ctx, self.rewrite(args))

    def rewrite(self, args: list[str]) -> list[str]:
        return args
