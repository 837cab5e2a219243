"""Texts as rows of tokens with a label: special tokens, types, cutting, batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import BertConfig, LlamaConfig

from keyhole.data.run import load_data, preview_data
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.encode import TextEncoder
from keyhole.data.tasks.parse import parse_spec, read_spec
from keyhole.data.tasks.question import Labels, Question, class_names, find_labels
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import read_config
from keyhole.model.structure.source import read_tokenizer
from tests.conftest import build_tokenizer
from tests.training.classifiers import save_encoder, write_task

TWO = Labels(("bad", "good"), (0, 1))


@pytest.fixture
def encoders(tmp_path: Path) -> dict[str, Path]:
    return {name: save_encoder(name, tmp_path / name) for name in ("bert", "roberta")}


def encoder(model: Path, **how: Any) -> TextEncoder:
    return TextEncoder(read_tokenizer(model), read_config(str(model), head="classification", num_labels=2), **how)


def words(made: TextEncoder, ids: list[int]) -> str:
    return " ".join(made.tokenizer.convert_ids_to_tokens(ids))


def test_pairs_are_written_as_the_family_does(encoders: dict[str, Path]) -> None:
    """With types where the model knows them; one text, or the prompt, alone."""
    pair = Question("", ("x", "y"), 1, texts=("w5 w6", "w7"))
    alone = Question("w8", ("x", "y"), 0)
    bert, roberta = encoder(encoders["bert"]), encoder(encoders["roberta"])
    (row,) = bert.encode([pair], TWO)
    assert words(bert, row.input_ids) == "[CLS] w5 w6 [SEP] w7 [SEP]"
    assert row.token_type_ids == [0, 0, 0, 0, 1, 1] and row.target == 1
    (row,) = roberta.encode([pair], TWO)
    assert words(roberta, row.input_ids) == "<s> w5 w6 </s> </s> w7 </s>" and row.token_type_ids is None
    (row,) = bert.encode([alone], TWO)
    assert words(bert, row.input_ids) == "[CLS] w8 [SEP]" and row.target == 0


def test_long_rows(encoders: dict[str, Path]) -> None:
    """The longer of two texts is cut at its end, or the row dropped, or refused. No limit stays in the tokenizer, which
    an evaluation has from the model."""
    long = Question("", ("x", "y"), 0, "line 3", texts=("w5", "w6 w7 w8 w9"))
    made = encoder(encoders["bert"], max_length=6)
    (row,) = made.encode([long], TWO)
    assert words(made, row.input_ids) == "[CLS] w5 [SEP] w6 w7 [SEP]" and made.truncated == 1
    assert made.tokenizer.backend_tokenizer.truncation is None
    assert encoder(encoders["bert"], max_length=6, overlong="drop").encode([long], TWO) == [None]
    with pytest.raises(UserError, match="line 3: 8 tokens, more than max_length=6"):
        encoder(encoders["bert"], max_length=6, overlong="error").encode([long], TWO)
    with pytest.raises(UserError, match="3 leaves no room for a text beside 3 special tokens"):
        encoder(encoders["bert"], max_length=3).encode([long], TWO)


def test_a_text_without_tokens_is_one_token() -> None:
    """A decoder's tokenizer adds nothing to an empty text, and a row of padding alone has no logits."""
    tokenizer, shape = build_tokenizer(), {"id2label": {0: "bad", 1: "good"}}
    questions = [Question("ab", ("x", "y"), 0), Question("", ("x", "y"), 1, "line 2")]
    made = TextEncoder(tokenizer, LlamaConfig(pad_token_id=1, **shape))
    plain, empty = made.encode(questions, TWO)
    assert plain.input_ids == tokenizer("ab").input_ids and empty.input_ids == [tokenizer.eos_token_id]
    typed = TextEncoder(tokenizer, BertConfig(pad_token_id=1, **shape))
    assert typed.encode(questions, TWO)[1].token_type_ids == [0]
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="line 2: an empty text, and the tokenizer has no bos"):
        made.encode(questions, TWO)


def settings(model: Path, tmp_path: Path, **changes: Any) -> DataSettings:
    given = write_task(tmp_path / "task") if not (tmp_path / "task").exists() else None
    given = given or {"task": str(tmp_path / "task" / "own.yaml"), "task_data": str(tmp_path / "task" / "data")}
    given = {key: value for key, value in given.items() if key != "device"}
    made = {"model": str(model), **given, "head": "classification", "num_train": 20, "num_dev": 4, "batch_size": 4}
    return DataSettings(**made | changes)


def test_batches_have_one_label_per_row(encoders: dict[str, Path], tmp_path: Path) -> None:
    data = load_data(settings(encoders["bert"], tmp_path))
    (batch,) = next(data.train)
    assert batch.keys() == {"input_ids", "attention_mask", "token_type_ids", "labels"}
    assert batch["labels"].shape == (4,) and batch["labels"].dtype == torch.int64
    hidden = batch["attention_mask"] == 0
    assert hidden.any() and (batch["input_ids"][hidden] == 1).all() and (batch["token_type_ids"][hidden] == 0).all()
    assert data.labels == ("bad", "good") and data.train.state_dict()["labels"] == ["bad", "good"]
    assert "token_type_ids" not in next(load_data(settings(encoders["roberta"], tmp_path)).train)[0]


def test_the_fingerprint_knows_labels(encoders: dict[str, Path], tmp_path: Path) -> None:
    data = load_data(settings(encoders["bert"], tmp_path)).train.dataset
    before = data.fingerprint
    data.targets[0] = 1 - data.targets[0]
    assert data.fingerprint != before
    data.targets[0] = 1 - data.targets[0]
    data.types[-1] ^= 1
    assert data.fingerprint != before


def test_a_value_is_a_regression(encoders: dict[str, Path], tmp_path: Path) -> None:
    made = settings(encoders["bert"], tmp_path)
    (tmp_path / "task" / "own.yaml").write_text(
        "columns: {a: a, b: b, label: label, score: score}\nprompt: '{{ a }}'\ncandidates: ['0', '1']\nvalue: score\n"
        "metric: [pearson, accuracy]\n"
    )
    data = load_data(made)
    (batch,) = next(data.train)
    assert data.labels == ("score",) and batch["labels"].dtype == torch.float32
    assert set(batch["labels"].tolist()) <= {0.5, 1.5} and "score from 0.5 to 1.5" in "\n".join(data.report)
    (batch,) = next(load_data(settings(encoders["bert"], tmp_path, num_labels=2)).train)
    assert batch["labels"].dtype == torch.int64


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "copa"}, "task copa: its candidates differ from row to row"),
        ({"task": "squad"}, "task squad: its answers are free text"),
        ({"num_labels": 3}, "num_labels: 3, but task own has 2 labels"),
        ({"test_task": "rte"}, "task: own has the labels bad, good, rte has entailment, not_entailment"),
        ({"packing": True}, "packing: True has no meaning for a classifier"),
        ({"train_end_token": True}, "train_end_token: True has no meaning"),
        ({"task": None, "train_data": "x.jsonl", "num_labels": 2}, "labels come from a task"),
    ],
)
def test_what_a_classifier_cannot_do_is_refused(
    encoders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    made = settings(encoders["bert"], tmp_path, **changes)
    (tmp_path / "task" / "data" / "rte").mkdir()
    (tmp_path / "task" / "data" / "rte" / "dev.jsonl").write_text('{"premise": "w1", "hypothesis": "w2", "label": 0}\n')
    with pytest.raises(UserError, match=says):
        load_data(made)


def test_positions_behind_the_padding(encoders: dict[str, Path], tmp_path: Path) -> None:
    """RoBERTa's table of 40 has room for 38 tokens: data that need more are refused before a step."""
    made = settings(encoders["roberta"], tmp_path)
    path = tmp_path / "task" / "data" / "own" / "train.jsonl"
    path.write_text(f'{{"a": "w1", "b": "{"w2 " * 34}", "label": 1}}\n' * 5)
    with pytest.raises(UserError, match="the 38 positions the model has"):
        load_data(made)


def test_cutting_leaves_no_mark_in_the_tokenizer(encoders: dict[str, Path], tmp_path: Path) -> None:
    """The model saves the tokenizer that has cut rows: the same file as one that has read nothing."""
    data = load_data(settings(encoders["bert"], tmp_path, max_length=4))
    assert any("truncated to max_length=4" in line for line in data.report)
    fresh = read_tokenizer(encoders["bert"])
    assert data.tokenizer.backend_tokenizer.to_str() == fresh.backend_tokenizer.to_str()


def test_the_preview_shows_labels(encoders: dict[str, Path], tmp_path: Path) -> None:
    shown = preview_data(settings(encoders["bert"], tmp_path), 1)
    assert "sample 1 of 20" in shown and "[CLS]|" in shown and ("label bad" in shown or "label good" in shown)


SST2, MNLI = read_spec("sst2"), read_spec("mnli")


def config(*names: str, **changes: object) -> hf.BertConfig:
    return hf.BertConfig(num_labels=len(names), id2label=dict(enumerate(names)), **changes)


def test_names_are_the_datas_words() -> None:
    assert class_names(SST2) == ("negative", "positive")
    assert class_names(read_spec("boolq")) == ("false", "true")
    assert class_names(read_spec("stsb")) == ("score",)
    assert class_names(read_spec("stsb"), 6) == ("0", "1", "2", "3", "4", "5")


def test_labels_are_matched_by_name_or_else_by_number() -> None:
    found = find_labels([MNLI], config("CONTRADICTION", "NEUTRAL", "ENTAILMENT"))
    assert found.order == (2, 1, 0) and found.names == ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
    assert find_labels([SST2], config("great", "negative")).order == (1, 0)
    found = find_labels([SST2], config("LABEL_0", "LABEL_1"))
    assert found.order == (0, 1) and found.names == ("negative", "positive")


def test_other_names_are_refused_unless_a_head_is_asked_for() -> None:
    """Nobody can know whether `ham` is negative."""
    with pytest.raises(UserError, match="its labels are ham, spam .* task sst2 are negative, positive"):
        find_labels([SST2], config("ham", "spam"))
    assert find_labels([SST2], config("ham", "spam"), head_asked=True).names == ("negative", "positive")


def test_tasks_of_one_head_have_the_same_labels() -> None:
    two = config("LABEL_0", "LABEL_1")
    assert find_labels([read_spec("rte"), read_spec("qnli")], two).names == ("entailment", "not_entailment")
    with pytest.raises(UserError, match="sst2 has the labels negative, positive, rte has"):
        find_labels([SST2, read_spec("rte")], two)
    for head_asked in (False, True):  # no number of labels would help
        with pytest.raises(UserError, match="sst2 has the labels negative, positive, mnli has entailment, neutral"):
            find_labels([SST2, MNLI], two, head_asked)


def test_models_that_give_several_labels_are_refused() -> None:
    with pytest.raises(UserError, match="problem_type=multi_label_classification with 2 labels"):
        find_labels([SST2], config("negative", "positive", problem_type="multi_label_classification"))
    with pytest.raises(UserError, match="its head is for 3 labels .* but task sst2 has 2 .* head=classification draws"):
        find_labels([SST2], config("a", "b", "c"))
    with pytest.raises(UserError, match="num_labels: 3, but task sst2 has 2 labels; set num_labels=null"):
        find_labels([SST2], config("a", "b", "c"), head_asked=True)


@pytest.mark.parametrize("candidates", ['[" a", "a"]', '["A", "a"]'])
def test_two_labels_of_one_name_are_refused(candidates: str) -> None:
    head = "columns: {x: x, label: label}\nprompt: '{{ x }}'\nmetric: accuracy\n"
    spec = parse_spec(f"{head}candidates: {candidates}\n", "own", "own.yaml")
    with pytest.raises(UserError, match="task own: two of its labels have one name"):
        class_names(spec)
