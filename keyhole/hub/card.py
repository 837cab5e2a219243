"""The model card: README.md with metadata for the hub, written from the files of a run.

    run/config.yaml      method, data and settings; those that differ from the defaults are printed
    run/metrics.jsonl    the loss of the first and the last steps, evaluations, tests; for a checkpoint, up to its step
    run/env.json         versions and hardware
    config.json          the kind of model

Local paths are not published: of a file only its name appears, of a model or data set its hub id. If the directory has
a card of the user's own (README.md), it is used instead.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import keyhole
from keyhole.config.dump import dump
from keyhole.config.fields import sections, settings
from keyhole.data.opened import kind_of
from keyhole.errors import UserError
from keyhole.hub.run_files import Unusable, read_entries, read_environment, read_object, read_settings
from keyhole.methods import METHODS
from keyhole.methods.traits import Traits
from keyhole.model.structure.source import has_adapter, names_classifier

README = "README.md"
NOT_TOLD = {"model", "method", "output_dir", "push_to_hub", "hub_model_id", "hub_private_repo", "device", "data_cache"}
NOT_TOLD |= {"train_data", "eval_data", "task", "test_task", "task_data", "report_to", "rank_timeout", "chat_template"}
ROWS = 12  # evaluations shown
HUB_ID, CHECKPOINT = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}"), re.compile(r"checkpoint-(\d+)")


def card(directory: Path, name: str) -> str:
    """README.md of the model in a directory, which may be a run's output or a checkpoint in it. name: its hub id."""
    run = next((at for at in (directory / "run", directory.parent / "run") if (at / "config.yaml").exists()), None)
    try:
        return _card(directory, run, name)
    except Unusable as fault:
        raise UserError(
            f"push: no card can be made of this model: {fault}; put the file back, or put a {README} of your own into "
            f"{directory}"
        ) from fault


def _card(directory: Path, run: Path | None, name: str) -> str:
    config = {} if run is None else read_settings(run / "config.yaml")
    model = read_object(directory / "config.json")
    entries = [] if run is None else read_entries(run / "metrics.jsonl", _last_step(directory))
    parts = [_title(name, config), *([_training(config, model, entries)] if config else []), _figures(entries)]
    parts += [
        _settings(config) if config else "",
        "" if run is None else _environment(run / "env.json"),
        _use(name, model, has_adapter(directory)),
    ]
    head = dump(_metadata(name, config, model, entries))
    return f"---\n{head}---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _metadata(
    name: str, config: dict[str, Any], model: dict[str, Any], entries: list[dict[str, Any]]
) -> dict[str, Any]:
    kind = "text-classification" if names_classifier(model) else "text-generation"
    found: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": kind}
    if base := hub_id(config.get("model")):
        found["base_model"] = base
    if data := [hub for source in _listed(config.get("train_data")) if (hub := hub_id(source))]:
        found["datasets"] = data
    found["tags"] = ["keyhole", *([config["method"]] if "method" in config else [])]
    with_test = (entry for entry in reversed(entries) if any(key.startswith("test_") for key in entry))
    tested: dict[str, Any] = next(with_test, {})
    tasks = [Path(task).stem for task in _listed(config.get("task"))]
    metrics = [
        {"type": key.removeprefix("test_"), "value": round(value, 4)}
        for key, value in tested.items()
        if key.startswith("test_") and isinstance(value, float)
    ]
    if tasks and metrics:
        result = {"task": {"type": kind}, "dataset": {"name": ", ".join(tasks), "type": tasks[0]}, "metrics": metrics}
        found["model-index"] = [{"name": name.rpartition("/")[2], "results": [result]}]
    return found


def _title(name: str, config: dict[str, Any]) -> str:
    base = hub_id(config.get("model"))
    made = f"[{base}](https://huggingface.co/{base})" if base else f"`{_told(config.get('model', ''))}`"
    how = f"A fine-tuned {made}: method `{config['method']}` of keyhole." if config else "A model saved by keyhole."
    return f"# {name.rpartition('/')[2]}\n\n{how}"


def _training(config: dict[str, Any], model: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    steps = max((entry["step"] for entry in entries), default=0)
    rows = config["batch_size"] * config["gradient_accumulation_steps"]
    lines = [f"- method: `{config['method']}`, {steps:,} steps of {rows:,} rows"]
    peak, course = config["learning_rate"], config["lr_scheduler_type"]
    lines.append(f"- learning rate: {peak if isinstance(peak, str) else f'{peak:g}'}, {course}")
    for key, title in (("task", "tasks"), ("train_data", "trained on"), ("eval_data", "evaluated on")):
        if sources := _listed(config.get(key)):
            told = [Path(source).name if key == "task" else _told(source) for source in sources]
            lines.append(f"- {title}: {', '.join(f'`{name}`' for name in told)}")
    over = config["train_on"] if config.get("task") is None else config["loss"]
    lines.append(f"- loss over: {'labels' if names_classifier(model) else over}")
    return "\n".join(["## Training", "", *lines])


def _figures(entries: list[dict[str, Any]]) -> str:
    """The loss at both ends, every evaluation (or twelve of them), and the tests."""
    losses = [entry["loss"] for entry in entries if entry.get("loss") is not None]
    if not losses:
        return ""
    tail = losses[-max(1, len(losses) // 10) :]
    last = "at the last logged step" if len(tail) == 1 else f"over the last {len(tail)} logged steps"
    course = f"{losses[0]:.4f} at the first step, {sum(tail) / len(tail):.4f} {last}"
    lines = ["## Figures", "", f"- training loss: {course}"]
    speeds = [entry["tokens_per_second"] for entry in entries if entry.get("tokens_per_second") is not None]
    if speeds:
        lines.append(f"- tokens per second: {sorted(speeds)[len(speeds) // 2]:,.0f} (median)")
    peaks = {
        unit: [e[key] for e in entries if e.get(key) is not None]
        for key, unit in (("gpu_gib", "GPU"), ("host_gib", "host"))
    }
    lines += [f"- peak {unit} memory: {max(values):.2f} GiB" for unit, values in peaks.items() if values]
    evaluated = [e for e in entries if "eval_loss" in e]
    if evaluated:
        keys = [key for key in evaluated[-1] if key not in ("step", "eval_tokens", "eval_rows")]
        shown = _some(evaluated)
        lines += ["", "| step | " + " | ".join(key.removeprefix("eval_") for key in keys) + " |"]
        lines += ["|---" * (1 + len(keys)) + "|"]
        lines += ["| " + " | ".join([str(e["step"]), *(_number(e.get(key)) for key in keys)]) + " |" for e in shown]
    for entry in entries:
        tests = {key: value for key, value in entry.items() if key.startswith("test_")}
        if tests:
            numbers = ", ".join(f"{key.removeprefix('test_')} {_number(value)}" for key, value in tests.items())
            lines += ["", f"Test of step {entry['step']}: {numbers}"]
    return "\n".join(lines)


def _some(evaluated: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """ROWS of the evaluations at most, the first and the last among them."""
    if len(evaluated) <= ROWS:
        return evaluated
    apart = -(-(len(evaluated) - 1) // (ROWS - 1))
    return [*evaluated[:-1:apart], evaluated[-1]]


def _settings(config: dict[str, Any]) -> str:
    """The settings that differ from the defaults, as a config for keyhole."""
    own = METHODS[config["method"]].section if config.get("method") in METHODS else None
    plain = settings()
    told = {
        key: value
        for key, value in config.items()
        if key not in sections() and key not in NOT_TOLD and key in plain and value != plain[key].default
    }
    if own in config:
        changed = _changed(METHODS[config["method"]], config[own])
        told |= {own: changed} if changed else {}
    body = dump({"method": config["method"]} | told)
    return f"## Settings\n\nThose that differ from the defaults:\n\n```yaml\n{body}```"


def _changed(row: Traits, own: dict[str, Any]) -> dict[str, Any]:
    """Own settings of a method that are neither their default nor what a null default stands for (`Traits.fill`)."""
    plain = row.settings()
    kept = {key: value for key, value in own.items() if vars(plain).get(key) is not None}
    usual = vars(replace(plain, **kept).filled())
    defaults = {key: usual[key] if value is None else value for key, value in vars(plain).items()}
    return {key: value for key, value in own.items() if value != defaults.get(key)}


def _environment(path: Path) -> str:
    versions, devices = read_environment(path)
    if not versions and not devices:
        return ""
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"## Versions and hardware\n\n{listed}; {', '.join(devices)}"


def _use(name: str, model: dict[str, Any], adapted: bool) -> str:
    """How to load it. adapted: adapters were learned beside the weights, which a plain load leaves out."""
    if names_classifier(model):
        task = "AutoModelForSequenceClassification"
    else:
        task = "AutoModelForCausalLM"
    lines = ["from peft import PeftModel"] if adapted else []
    lines += [f"from transformers import {task}, AutoTokenizer", ""]
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("{name}")', f'model = {task}.from_pretrained("{name}")']
    lines += [f'model = PeftModel.from_pretrained(model, "{name}", subfolder="adapter")'] if adapted else []
    return "\n".join(["## Use", "", "```python", *lines, "```"])


def _last_step(directory: Path) -> int | None:
    """The step of a checkpoint, by the name of its directory; None for the model of a whole run."""
    found = CHECKPOINT.fullmatch(directory.absolute().name)
    return None if found is None else int(found[1])


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [value]


def hub_id(source: Any) -> str | None:
    """The source, if it is a hub id and not a path."""
    if not isinstance(source, str) or not HUB_ID.fullmatch(source) or source.startswith("."):
        return None
    return None if Path(source).exists() or kind_of(Path(source)) else source


def _told(source: str) -> str:
    """The published name of a source: its hub id, or the name of the file or directory."""
    return hub_id(source) or Path(source).name or source


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "-" if value is None else str(value)


def written_by() -> str:
    """For the message of a commit."""
    return f"keyhole {keyhole.__version__}"
