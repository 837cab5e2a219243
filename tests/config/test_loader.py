"""The loader: what goes in comes out, all faults come at once, and junk never ends in a traceback."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.config import Bytes, TrainConfig, load_config, resolve, to_yaml
from keyhole.config import fields as table
from keyhole.config.loader import parse_config, parse_settings
from keyhole.errors import UserError
from keyhole.methods.baselines.traits import SGDConfig
from keyhole.methods.zo.traits import ZOConfig

GOOD = """
model: some/model
method: zo
train_data: data.jsonl
output_dir: out
max_steps: 10
"""


def faults_of(text: str, *overrides: str) -> str:
    """The message of the UserError that reading must raise."""
    with pytest.raises(UserError) as caught:
        parse_config(text, overrides)
    return str(caught.value)


letters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
names = st.text(letters, min_size=1, max_size=20).filter(lambda s: s.strip() and s != "demo" and not set("$~") & set(s))
unit_interval = st.floats(0, 0.999)
rates = st.floats(1e-12, 1e3)
counts = st.integers(1, 10**9)
zo_configs = st.builds(
    ZOConfig,
    eps=st.floats(1e-8, 1.0),
    directions=st.integers(1, 4096),
    distribution=st.sampled_from(["gaussian", "rademacher"]),
    clip=st.none() | rates,
)
configs = st.builds(
    TrainConfig,
    model=names,
    method=st.sampled_from(["adamw", "sgd", "zo"]),
    train_data=names | st.lists(names, min_size=1, max_size=3),
    output_dir=names.map(lambda name: f"out/{name}"),
    eval_data=st.none() | names,
    dtype=st.none() | st.sampled_from(["float32", "bfloat16"]),
    device=st.sampled_from([None, "cpu", "cuda:1"]),
    gpu_memory=st.none() | st.integers(1, 2**45).map(Bytes),
    max_steps=counts,
    learning_rate=rates,
    warmup_ratio=unit_interval,
    weight_decay=rates,
    max_length=st.none() | st.integers(2, 10**6),
    seed=st.integers(0, 2**63 - 1),
    save_total_limit=st.none() | counts,
    report_to=st.sampled_from([None, "tensorboard", ["wandb", "mlflow"]]),
    zo=zo_configs,
    adam_beta1=unit_interval,
    adam_epsilon=rates,
    rounding=st.sampled_from(["stochastic", "nearest"]),
    sgd=st.builds(SGDConfig, momentum=unit_interval),
)


@settings(max_examples=30)
@given(configs)
def test_any_config_survives_yaml(config: TrainConfig) -> None:
    """Written and read again, every value and its type is the same, to the last bit of a float."""
    again, _ = parse_config(to_yaml(config))
    assert again == config
    assert type(again.gpu_memory) is type(config.gpu_memory)
    assert resolve(again)[0] == again


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.dates(), st.binary())
)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3), max_leaves=8
)
words = st.text(max_size=12)
known_keys = st.sampled_from([*table.settings(), *table.sections()])


@settings(max_examples=50)
@given(st.dictionaries(known_keys | st.text(max_size=6), trees, max_size=6))
def test_any_tree_is_read_or_refused(tree: dict[str, Any]) -> None:
    """Random values under real and invented keys give a config or a UserError, nothing else."""
    try:
        parse_config(yaml.safe_dump(tree))
    except UserError as error:
        assert str(error).startswith("config")


@settings(max_examples=150)
@given(st.text(st.characters() | st.sampled_from(list("[]{}:,-&*!|>'\"#%@`\n\t  ?~=<")), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """Random characters, YAML's own signs among them, never end in a traceback."""
    with pytest.raises(UserError):
        parse_config(text)


@settings(max_examples=150)
@given(st.lists(words | st.builds("{}={}".format, known_keys, words), max_size=3))
def test_any_override_is_read_or_refused(given_words: list[str]) -> None:
    try:
        config, _ = parse_config(GOOD, given_words)
    except UserError as error:
        assert "command line" in str(error) or "missing" in str(error) or "problem" in str(error)
    else:
        assert isinstance(config, TrainConfig)


def test_all_faults_are_collected_with_their_lines() -> None:
    """One message names every fault: line, key, value found, what was expected, and the nearest name."""
    text = GOOD + "learnin_rate: 1e-3\nbatch_size: eight\nplacement: streem\nzo:\n  epss: 1\n  directions: 0"
    message = faults_of(text, "packing=maybe", "gpu_memory=8G", "learning_rate=auto")
    for part in (
        "8 problems",
        "command line: learning_rate: found `auto`, expected number > 0 and <= 1e+30 or null; no rate is searched",
        "line 7: learnin_rate: unknown key; did you mean `learning_rate`?",
        "line 8: batch_size: found `eight`, expected whole number >= 1",
        "line 9: placement: found `streem`, expected resident | stream | auto; did you mean `stream`?",
        "line 11: zo.epss: unknown key; did you mean `zo.eps`?",
        "line 12: zo.directions: found `0`, expected whole number >= 1",
        "command line: packing: found `maybe`, expected true | false",
        "command line: gpu_memory: found `8G`, expected a size with its unit",
    ):
        assert part in message


def test_missing_keys_are_named_with_their_meaning() -> None:
    message = faults_of("method: zo")
    for key in ("model", "output_dir"):
        assert f"{key}: missing" in message and table.settings()[key].doc in message
    assert "method: missing" not in message


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("lr", "learning_rate"),
        ("per_device_train_batch_size", "batch_size"),
        ("eps", "did you mean `zo.eps`"),
        ("beta1", "`adam_beta1`"),
        ("lora.rank", "`lora` has r, "),
        ("zo.learning_rate", "`learning_rate`"),
        ("momentum", "`sgd.momentum`"),
        ("train_data.0", "is a value, not a section"),
        ("Method", "`method`"),
    ],
)
def test_an_unknown_key_is_answered_by_the_right_one(key: str, ours: str) -> None:
    """Names of other trainers, keys in the wrong section and misspellings are answered with ours."""
    assert ours in faults_of(GOOD, f"{key}=1")


def test_a_key_given_twice_is_refused() -> None:
    """YAML would silently keep the last; both lines are named instead."""
    assert "line 7: max_steps: given twice, also in line 6" in faults_of(GOOD + "max_steps: 20\n")
    assert "zo.eps: given twice" in faults_of(GOOD + "zo:\n  eps: 1\nzo.eps: 2\n")
    assert "`text` is given twice" in faults_of(GOOD + "columns: {text: a, text: b}\n")
    assert "`think` is given twice" in faults_of(GOOD + "chat_template_kwargs: {a: {think: 1, think: 2}}\n")


@pytest.mark.parametrize("value", ["*.mlp.*", "[*.mlp.*, embeddings]", "[embeddings, *norm]"])
def test_a_name_that_begins_with_a_star_needs_quotes(value: str) -> None:
    """YAML takes it for an alias; in a file the message says so, and in a list on the command line."""
    says = "a text that begins with * needs quotes"
    assert says in faults_of(f"{GOOD}freeze: {value}\n")
    if value.startswith("["):
        assert says in faults_of(GOOD, f"freeze={value}")
    else:
        assert parse_config(GOOD, [f"freeze={value}"])[0].freeze == value


def test_a_mapping_with_brackets_is_told_of_the_quotes_inside() -> None:
    """Quotes around the whole would make a text of it."""
    says = faults_of(GOOD, "task_splits={test: dev[:50%]}")
    assert "text with brackets needs quotes inside: 'task_splits={name: \"...\"}'" in says
    good = parse_config(GOOD, ['task_splits={test: "dev[:50%]"}'])[0]
    assert good.task_splits == {"test": "dev[:50%]"}


def test_broken_yaml_is_named_by_its_line() -> None:
    assert "line 7: not valid YAML" in faults_of(GOOD + "columns: [a, }\n")


@pytest.mark.parametrize(("content", "says"), [(b"\xff\xfe\x00junk", "not UTF-8"), (b"", "empty")])
def test_files_that_are_not_configs(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        load_config(path)


def test_an_unreadable_path_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path, "a\0b"):
        with pytest.raises(UserError, match="cannot read"):
            load_config(path)


OVERRIDES = [
    ("learning_rate=2e-5", "learning_rate", 2e-5),
    ("zo.eps=1e-2", "zo.eps", 1e-2),
    ("zo={eps: 1e-2, directions: 3}", "zo.directions", 3),
    ("max_length=null", "max_length", None),
    ("eval_data=none", "eval_data", None),
    ("train_data=[a.jsonl, 'b c.jsonl']", "train_data", ["a.jsonl", "b c.jsonl"]),
    ("train_data=*.jsonl", "train_data", "*.jsonl"),
    ("train_data=a=b.jsonl", "train_data", "a=b.jsonl"),
    ("output_dir=x: y # z", "output_dir", "x: y # z"),
    ('output_dir="null"', "output_dir", "null"),
    ("gpu_memory=8GiB", "gpu_memory", 8 * 2**30),
    ("packing=true", "packing", True),
]


@pytest.mark.parametrize(("word", "key", "value"), OVERRIDES)
def test_overrides_replace_the_files_values(word: str, key: str, value: Any) -> None:
    """key=value sets the key, in sections too, with null, lists and signs that YAML would trip over."""
    config, _ = parse_config(GOOD + "eval_data: held.jsonl\n", [word])
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


def test_an_override_repairs_a_bad_value_and_the_last_one_wins() -> None:
    """What is replaced is not checked; of two overrides the later counts, and a warning says so, unless they agree."""
    words = ["batch_size=2", "zo={eps: 1e-3}", "batch_size=3", "zo.eps=1e-3"]
    config, warnings = parse_config(GOOD + "batch_size: many\n", words)
    assert config.batch_size == 3
    twice = [warning for warning in warnings if "twice" in warning]
    assert twice == ["command line: batch_size: given twice; `3` counts, not `2`"]


@pytest.mark.parametrize("value", ["{sentence} It was", "{label}", "[INST] {x} [/INST]"])
def test_a_text_on_the_command_line_may_begin_with_a_brace(value: str) -> None:
    """Templates are texts, and no YAML; in quotes they have YAML's escapes."""
    assert parse_settings([f"prompt={value}"], ["prompt"]) == {"prompt": value}
    assert parse_settings(['prompt="a\\n{b}"'], ["prompt"]) == {"prompt": "a\n{b}"}
    assert parse_settings(["completion= {label}"], ["completion"]) == {"completion": " {label}"}, (
        "not without its space"
    )
    assert parse_settings(["completion=null", "seed= 3"], ["completion", "seed"]) == {"completion": None, "seed": 3}


def test_none_is_a_word_where_it_is_one() -> None:
    """`activations: none` keeps everything for backward; it is no null, with or without quotes."""
    good = GOOD.replace("zo", "lomo")
    for text in ("activations: none\n", "activations: 'none'\n"):
        assert parse_config(good + text)[0].activations == "none"
    assert parse_config(good, ["activations=none"])[0].activations == "none"
    assert parse_config(good, ["activations=null"])[0].activations is None
    assert parse_config(GOOD, ["gpu_memory=none"])[0].gpu_memory is None


def test_a_key_by_its_former_name_is_read_with_a_line_that_names_the_new_one() -> None:
    """In a file and on the command line, which goes before the file; only in the section of the method."""
    good = GOOD.replace("zo", "lomo")
    config, warnings = parse_config(good + "lomo: {activations: host}\nlsp: {compile: true}\n")
    assert config.activations == "host" and not config.compile
    assert "lomo.activations: is `activations` now" in warnings[0] and "lsp.compile: has no effect" in warnings[1]
    assert parse_config(good + "activations: none\n", ["lomo.activations=host"])[0].activations == "host"
    assert parse_config(good.replace("lomo", "adamw") + "adamw.eps: 1e-6\n")[0].adam_epsilon == 1e-6
    assert "lomo.compile: is `compile` now, which is given too" in faults_of(
        good + "compile: true\nlomo.compile: false\n"
    )


def test_a_key_that_is_gone_says_what_to_do_instead() -> None:
    """An ablation is an argument in Python."""
    assert "lomo.fused: is no key any more; it is an argument of the method in Python" in faults_of(
        GOOD, "lomo.fused=true"
    )
    assert "keyhole.load(..., overlap=...)" in faults_of(GOOD, "offload.overlap=false")
