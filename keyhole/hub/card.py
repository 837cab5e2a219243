"""The model card: README.md with metadata for the hub, written from the files of a run.

    run/config.yaml      method, data and settings; those that differ from the defaults are printed
    run/metrics.jsonl    the loss of the first and the last steps, evaluations, tests; for a checkpoint, up to its step;
                         lines and values that no run writes are left out
    run/env.json         versions and hardware
    config.json          the kind of model

Local paths are not published: of a file only its name appears, of a model or data set its hub id. If the directory has
a card of the user's own (README.md), it is used instead.
"""

import re
from pathlib import Path

from keyhole.config import TrainConfig, load_config
from keyhole.config.fields import sections, settings
from keyhole.config.rules import as_list
from keyhole.config.types import dump, to_dict
from keyhole.data.opened import kind_of
from keyhole.disk.json_text import Json, read_json
from keyhole.errors import UserError, as_user_error
from keyhole.methods import METHODS
from keyhole.model.structure.source import has_adapter, names_classifier
from keyhole.model.weights.small_files import CARD
from keyhole.report.entries import Entry, is_test, read_metrics

NOT_TOLD = {
    "model", "method", "output_dir", "push_to_hub", "hub_model_id", "hub_private_repo", "device", "data_cache",
    "train_data", "eval_data", "task", "test_task", "task_data", "report_to", "rank_timeout", "chat_template",
}  # fmt: skip
MOST_BYTES = 2**22
FOLDERS = re.compile(r"[^+]*/")  # of `/home/me/a.jsonl+b.jsonl[:50%]`
HUB_ID, CHECKPOINT = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}"), re.compile(r"checkpoint-(\d+)")


def card(directory: Path, name: str) -> str:
    """README.md of the model in a directory, which may be a run's output or a checkpoint in it. name: its hub id."""
    run = next((at for at in (directory / "run", directory.parent / "run") if (at / "config.yaml").exists()), None)
    config, entries, machine = None, list[Entry](), ""
    try:
        model = read_json(directory / "config.json", "model", MOST_BYTES)
        if run is not None:
            config, _ = load_config(run / "config.yaml")
            machine = _machine(run / "env.json")
            last = CHECKPOINT.fullmatch(directory.absolute().name)
            entries = _entries(run / "metrics.jsonl", int(last[1]) if last else None)
    except UserError as fault:
        raise UserError(
            f"push: no card can be made of this model: {fault}; put the file back, or put a {CARD} of your own into "
            f"{directory}"
        ) from fault
    parts = [_title(name, config)]
    if config is not None:
        parts += [_training(config, model, entries), _figures(entries), _settings(config), machine]
    parts.append(_use(name, model, has_adapter(directory)))
    head = dump(_metadata(name, config, model, entries))
    return f"---\n{head}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _entries(path: Path, last: int | None) -> list[Entry]:
    kept = [entry for entry in read_metrics(path) if last is None or entry["step"] <= last]
    if not any("loss" in entry for entry in kept):
        raise UserError(f"{path} holds no step of the run")
    return [{key: value for key, value in entry.items() if type(value) in (int, float, type(None))} for entry in kept]


def _machine(path: Path) -> str:
    """Versions and the names of the devices of run/env.json; empty if it does not exist."""
    if not path.exists():
        return ""
    found = read_json(path, "run", MOST_BYTES)
    with as_user_error(f"{path} holds no versions and devices"):
        named = ", ".join(str(each["name"]) for each in (found["gpus"] or [found["cpu"]]))
        listed = ", ".join(f"{name} {version}" for name, version in found["versions"].items() if version)
    return f"## Versions and hardware\n\n{listed}; {named}"


def _metadata(name: str, config: TrainConfig | None, model: Json, entries: list[Entry]) -> Json:
    kind = "text-classification" if names_classifier(model) else "text-generation"
    found: Json = {"library_name": "transformers", "pipeline_tag": kind}
    if config is None:
        return found | {"tags": ["keyhole"]}
    if base := hub_id(config.model):
        found["base_model"] = base
    if data := [hub for source in as_list(config.train_data) if (hub := hub_id(source))]:
        found["datasets"] = data
    found["tags"] = ["keyhole", config.method]
    tests = [entry for entry in entries if is_test(entry)]
    tasks = [Path(task).stem for task in as_list(config.task)]
    metrics = [
        {"type": key.removeprefix("test_"), "value": round(value, 4)}
        for key, value in (tests[-1] if tests else {}).items()
        if key.startswith("test_") and isinstance(value, float)
    ]
    if tasks and metrics:
        result = {"task": {"type": kind}, "dataset": {"name": ", ".join(tasks), "type": tasks[0]}, "metrics": metrics}
        found["model-index"] = [{"name": name.rpartition("/")[2], "results": [result]}]
    return found


def _title(name: str, config: TrainConfig | None) -> str:
    how = "A model saved by keyhole."
    if config is not None:
        base = hub_id(config.model)
        made = f"[{base}](https://huggingface.co/{base})" if base else f"`{_told(config.model)}`"
        how = f"A fine-tuned {made}: method `{config.method}` of keyhole."
    return f"# {name.rpartition('/')[2]}\n\n{how}"


def _training(config: TrainConfig, model: Json, entries: list[Entry]) -> str:
    steps, rows = max((entry["step"] for entry in entries), default=0), config.batch_size
    rows *= config.gradient_accumulation_steps
    peak = config.learning_rate
    lines = [
        f"- method: `{config.method}`, {steps:,} steps of {rows:,} rows",
        f"- learning rate: {f'{peak:g}' if isinstance(peak, float | int) else peak}, {config.lr_scheduler_type}",
    ]
    if tasks := as_list(config.task):
        lines.append(f"- tasks: {', '.join(f'`{Path(task).name}`' for task in tasks)}")
    for sources, title in ((config.train_data, "trained on"), (config.eval_data, "evaluated on")):
        if named := [f"`{_told(source)}`" for source in as_list(sources)]:
            lines.append(f"- {title}: {', '.join(named)}")
    over = config.train_on if config.task is None else config.loss
    lines.append(f"- loss over: {'labels' if names_classifier(model) else over}")
    return "\n".join(["## Training", "", *lines])


def _figures(entries: list[Entry]) -> str:
    losses = [entry["loss"] for entry in entries if entry.get("loss") is not None]
    if not losses:
        return ""
    tail = losses[-max(1, len(losses) // 10) :]
    ends = f"{losses[0]:.4f} at the first step, {sum(tail) / len(tail):.4f} over the last {len(tail)} that were logged"
    lines = ["## Figures", "", f"- training loss: {ends}"]
    shown = [("evaluation", "eval_", entry) for entry in entries if "eval_loss" in entry][-1:]
    shown += [("test", "test_", entry) for entry in entries if is_test(entry)]
    for what, prefix, entry in shown:
        numbers = {key.removeprefix(prefix): value for key, value in entry.items() if key != "step"}
        lines.append(f"- {what} of step {entry['step']}: {', '.join(f'{k} {_number(v)}' for k, v in numbers.items())}")
    return "\n".join(lines)


def _settings(config: TrainConfig) -> str:
    """The settings that differ from the defaults, and from what a null default stands for, as a config."""
    row, plain = METHODS[config.method], settings()
    values = {key: value for key, value in to_dict(config).items() if key not in NOT_TOLD | sections().keys()}
    told = {key: value for key, value in values.items() if value != plain[key].default}
    if splits := told.get("task_splits"):
        told["task_splits"] = {FOLDERS.sub("", key): FOLDERS.sub("", files) for key, files in splits.items()}
    usual = vars(row.settings().filled())
    changed = {key: value for key, value in to_dict(config)[row.section].items() if value != usual[key]}
    body = dump({"method": config.method} | told | ({row.section: changed} if changed else {}))
    return f"## Settings\n\nThose that differ from the defaults:\n\n```yaml\n{body}```"


def _use(name: str, model: Json, adapted: bool) -> str:
    """How to load it. adapted: adapters were learned beside the weights, which a plain load leaves out."""
    task = "AutoModelForSequenceClassification" if names_classifier(model) else "AutoModelForCausalLM"
    lines = [
        *(["from peft import PeftModel"] if adapted else []),
        f"from transformers import {task}, AutoTokenizer\n",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = {task}.from_pretrained("{name}")',
        *([f'model = PeftModel.from_pretrained(model, "{name}", subfolder="adapter")'] if adapted else []),
    ]
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def hub_id(source: object) -> str | None:
    if not isinstance(source, str) or not HUB_ID.fullmatch(source) or source.startswith("."):
        return None
    return None if Path(source).exists() or kind_of(Path(source)) else source


def _told(source: str) -> str:
    """The published name of a source: its hub id, or the name of the file or directory."""
    return hub_id(source) or Path(source).name or source


def _number(value: float | None) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)
