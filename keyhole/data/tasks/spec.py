"""A task file: YAML that turns a data set into questions. The shipped files are in library/; your own work the same
way.

    title: The sentiment of a sentence (GLUE SST-2)
    columns: {sentence: [sentence, text], label: label}   name here: its names in the data; the first found is used
    prompt: "{{ sentence | trim }} It was"                Jinja over the columns
    candidates: [" terrible", " great"]                   the text of label 0, 1, ...
    labels: [[0, negative], [1, positive]]                spellings in the data; default: 0, 1, ...
    metric: accuracy                                      or a list; the first is the main one

Further keys:

    optional     columns that rows may lack (their value is then none)
    header       names of the cells of a CSV or TSV file without a header line; `...` at the end: more may follow
    rows         paths of lists: a row is repeated for each item, which replaces the list; `*` stands for the values of
                 an object whose values are all objects
    let          further names, each a Jinja expression over the columns and the names before it
    texts        [premise, hypothesis]: Jinja for the one or two input texts of a classifier (encoders, with
                 head=classification); default: the prompt
    candidates   also one Jinja expression: a list of texts that differs from row to row
    candidate    Jinja for one candidate, over the columns and `candidate`
    right        Jinja expression: the right candidate, or a list of them (instead of a label)
    value        the column with the number that `pearson` compares; candidates are then numbers, and without a label
                 the nearest one is right
    answer       Jinja: the answer in free text, which is trained on (instead of candidates)
    references   Jinja expression: all answers that count as right; default: the answer
    extract      a regular expression; its last match is the part of an answer that is compared
    program      Jinja over the columns and `completion`: a program that ends without error if the completion is right
    stop, max_new_tokens   where a generated answer ends
    end_token    also train the end token; for answers of many words
    hub          {dataset, config, train, test}: id and splits on the Hugging Face hub
    splits       {train, test, dev}: names of files, such as validation, val[:2270], val[:80%] or a+b (both files); a
                 list of such: the first whose files exist is used
    folders      further names of the task's folder

All values are read as text, so `labels: [[no], [yes]]` means these words.

Its programs (`Text`, `Expression`) run in the process of worker.py, in the sandbox of chat templates. A missing column
is an error, never an empty text. A null, a NaN, bytes, a list or an object is never written into a text as Python
prints it ("None", "['a']"): a task file must handle them explicitly (`x is none`, `x | join`). There are two filters
besides Jinja's:

    spans | slices(text)     the pieces of `text` from `start` to `end` (inclusive) of each span, as ReCoRD marks its
                             entities
    answers | listed         the list itself; a text is refused, of which `answers[0]` would be one letter (the cells
                             of a CSV are texts)
"""

import difflib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from keyhole.data.chat_template import Sandbox, written
from keyhole.data.examples import no_text
from keyhole.data.opened import Row
from keyhole.errors import UserError, listed, printable
from keyhole.machine.worker import bounded, why

RESULT, SHOWN = "result", "shown"
OF_TEXT = (  # filters that would convert a value to text first
    "trim", "lower", "upper", "capitalize", "title", "replace", "string", "escape", "e", "forceescape", "center",
    "indent", "wordwrap", "truncate", "striptags", "wordcount", "format", "urlize", "safe",
)  # fmt: skip
CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


class Text:
    """Jinja for a text with columns in it. names: those that it reads, columns and others."""

    def __init__(self, source: str, key: str) -> None:
        """key: the key of the source in the task file, for messages."""
        self.source, self.key = source, key
        try:
            self.names = {name.name for name in self.parsed(_sandbox()).find_all(nodes.Name) if name.ctx == "load"}
        except Exception as error:
            raise self._fault("not valid Jinja: ", error) from None

    def parsed(self, sandbox: Sandbox) -> nodes.Template:
        return sandbox.parse(self.source)

    def run(self, variables: Row) -> Any:
        """The value for a row. Only in the process of worker.py."""
        try:
            return self.made(_compiled(isinstance(self, Expression), self.source), variables)
        except Exception as error:  # filters raise any error, and Python refuses what Jinja makes of 20 nested loops
            raise self._fault("", error) from None

    def made(self, program: jinja2.Template, variables: Row) -> Any:
        return written(program, variables)

    def _fault(self, what: str, error: Exception) -> UserError:
        return UserError(f"{self.key}: {what}{printable(why(error), 200)}: {self.source!r:.120}")


class Expression(Text):
    """Jinja for one value; lists come as lists of texts, numbers or objects."""

    def parsed(self, sandbox: Sandbox) -> nodes.Template:
        value = sandbox.parse(f"{{{{ {self.source} }}}}").find(nodes.Output)
        if value is None or len(value.nodes) != 1 or isinstance(value.nodes[0], nodes.TemplateData):
            raise jinja2.TemplateSyntaxError("expected one expression", 1)
        return nodes.Template([nodes.Assign(nodes.Name(RESULT, "store"), value.nodes[0])], lineno=1)

    def made(self, program: jinja2.Template, variables: Row) -> Any:
        value = vars(program.make_module(variables))[RESULT]
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, jinja2.Undefined):
                str(part)  # raises, with the missing name
        return value if isinstance(value, str | int | float | list | dict | None) else list(value)


@functools.lru_cache(64)
def _compiled(is_expression: bool, source: str) -> jinja2.Template:
    sandbox = _sandbox()
    return sandbox.from_string(_Shown().visit((Expression if is_expression else Text)(source, "").parsed(sandbox)))


def _sandbox() -> Sandbox:
    sandbox = Sandbox(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    sandbox.filters |= {name: _of_text(sandbox.filters[name]) for name in OF_TEXT}
    sandbox.filters["slices"] = lambda spans, text: [text[span["start"] : span["end"] + 1] for span in spans]
    sandbox.filters |= {"listed": _listed, SHOWN: _shown}
    return sandbox


class _Shown(NodeTransformer):
    """Makes `a ~ b` check its parts as text filters do."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [nodes.Filter(part, SHOWN, [], [], None, None, lineno=node.lineno) for part in node.nodes]
        return self.generic_visit(nodes.Concat(parts, lineno=node.lineno))


def _shown(value: object) -> Any:
    """The value; refuses values that are not text, a finite number, a boolean or a date."""
    found = "" if isinstance(value, jinja2.Undefined) else no_text(value)  # a missing name raises when it is written
    if found:
        found += f", {value!r:.60}" if isinstance(value, list | tuple | dict | bytes) else ""
        raise UserError(f"found {found} where a text is written; correct or remove the row, or test for it")
    return value


def _listed(value: object) -> list[object]:
    """The list, empty for null; refuses anything else."""
    if value is not None and not isinstance(value, list):
        raise UserError(f"found {value!r:.60}, expected a list; a CSV or TSV holds none: use JSONL or Parquet")
    return value or []


def _of_text(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which refuses values that are not text; Jinja may pass a context before the value."""

    @functools.wraps(filter)
    def checked(*args: object, **kwargs: object) -> Any:
        _shown(next((value for value in args if not isinstance(value, CONTEXTS)), ""))
        return filter(*args, **kwargs)

    return checked


def extracted(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """The last match of a regular expression in each text, or its group; None where it matches nothing."""
    return bounded(functools.partial(_last, pattern), texts, lambda text: f"extract: `{pattern}`")


def _last(pattern: str, text: str) -> str | None:
    found = [match[1] if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    return next((part for part in reversed(found) if part is not None), "" if found else None)


LIBRARY = Path(__file__).parent / "library"
CHOICE, GENERATED, LIKELIHOOD = "choice", "generated", "likelihood"
METRICS = {
    "accuracy": CHOICE, "f1": CHOICE, "macro_f1": CHOICE, "matthews": CHOICE, "pearson": CHOICE,
    "exact_match": GENERATED, "token_f1": GENERATED, "exact_number": GENERATED, "pass@1": GENERATED,
    "perplexity": LIKELIHOOD,
}  # fmt: skip
LOWER_IS_BETTER = ("perplexity",)
SPLITS = ("train", "dev", "test")
Splits = tuple[dict[str, tuple[str, ...]], ...]
USUAL_SPLITS: Splits = ({"train": ("train",), "test": ("validation",)}, {"train": ("train",), "test": ("test",)})
# OWN: of a user's own task
OWN_SPLITS: Splits = ({"train": ("train",), "dev": ("validation",), "test": ("test",)}, *USUAL_SPLITS)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    name: str
    title: str
    columns: dict[str, tuple[str, ...]]
    prompt: Text
    metrics: tuple[str, ...]
    optional: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    let: dict[str, Expression] = field(default_factory=dict)
    texts: tuple[Text, ...] = ()
    candidates: tuple[str, ...] | Expression = ()
    candidate: Text | None = None
    labels: tuple[tuple[str, ...], ...] = ()
    right: Expression | None = None
    value: str | None = None
    answer: Text | None = None
    references: Expression | None = None
    extract: str | None = None
    program: Text | None = None
    stop: tuple[str, ...] = ()
    max_new_tokens: int = 64
    end_token: bool = False
    hub: dict[str, str] = field(default_factory=dict)
    splits: Splits = USUAL_SPLITS
    folders: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """How answers are found: chosen, generated, or neither (their likelihood is the result)."""
        return METRICS[self.metrics[0]]

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def has_label(self) -> bool:
        return "label" in self.columns or "label" in self.let

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with any content of the file except its title."""
        told = {each.name: vars(self)[each.name] for each in fields(self) if each.name != "title"}
        text = json.dumps(told, sort_keys=True, default=lambda program: program.source)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_loss(spec: TaskSpec, loss: str | None) -> None:
    """UserError if the task has no candidates that this loss could compare."""
    if loss == "candidates" and spec.kind != CHOICE:
        raise UserError(
            f"loss: candidates needs a choice; the answers of task {spec.name} are free text: set loss=tokens "
            "(in a comparison: under the task, and not under a method, whose settings win)"
        )


def task_names() -> list[str]:
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def is_task_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def plain(name: str) -> str:
    """A name without case, - _ . and spaces: SST-2 is sst2."""
    return re.sub(r"[-_. ]", "", name.lower())


def own_name(name: str) -> str:
    """The normalised name of a shipped task (SST-2 is sst2); any other name unchanged."""
    return name if is_task_file(name) else {plain(known): known for known in task_names()}.get(plain(name), name)


def task_name(name: str) -> str:
    """The name of a task: that of a shipped one, or that of the file without its suffix."""
    return Path(name).stem if is_task_file(name) else own_name(name)


def is_task_name(name: str) -> bool:
    return is_task_file(name) or own_name(name) in task_names()


def nearest_task(name: str) -> str:
    """The shipped task with the most similar name; "" if there is none."""
    return next(iter(difflib.get_close_matches(plain(name), task_names(), n=1)), "")


def unknown_task(name: str) -> str:
    meant = f"did you mean `{near}`? There" if (near := nearest_task(name)) else "there"
    return f"no task `{name}`; {meant} are {', '.join(task_names())}, and files such as my.yaml"


def check_names(names: Sequence[str], splits: dict[str, str] | None) -> None:
    """Refuses two tasks of the same name, whose results could not be distinguished, and splits of a missing task."""
    called: dict[str, str] = {}
    for name in names:
        own = task_name(name)
        if own in called:
            raise UserError(
                f"task: {called[own]} and {name} are both called {own}, and so would be their results; rename one "
                "file, or name a task once (task, test_task): train_weights repeats its rows"
            )
        called[own] = name
    for key in splits or {}:
        task, dot, _ = key.rpartition(".")
        if dot and task_name(task) not in called:
            raise UserError(f"task_splits: found {key}, but no task {task} is set; there are {listed(called)}")


def own_splits(given: dict[str, str] | None, name: str) -> dict[str, str]:
    """The splits that the setting names for this task: `train`, or `boolq.train` if there are several tasks."""
    found = {}
    for key, value in (given or {}).items():
        task, _, split = key.rpartition(".")
        if split not in SPLITS:
            raise UserError(f"task_splits: found {key}, expected {', '.join(SPLITS)}, or of one task: {name}.train")
        if not task or task_name(task) == name:
            found[split] = value
    return found


def listed_names(names: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list; names of shipped tasks are normalised."""
    words = [names] if isinstance(names, str) else list(names or ())
    return [own_name(name) for word in words for name in divided(word)]


def divided(word: str) -> list[str]:
    """`sst2,rte` is two names, and so is `sst2,held-out.jsonl` where there is such a file; a path with a comma in it is
    one. Unknown names among others are kept, to be refused by name."""
    if os.path.exists(word):
        return [word]
    parts = [part.strip() for part in word.split(",")]
    known = [is_task_name(part) or os.path.isfile(os.path.expanduser(part)) for part in parts]
    shipped = any(is_task_name(part) and not is_task_file(part) for part in parts)
    return parts if all(known) or (shipped and all(parts) and "/" not in word) else [word]
