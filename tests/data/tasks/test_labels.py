"""Which label of a model is which class of a task."""

import pytest
import transformers as hf

from keyhole.data.tasks.parse import parse_spec, read_spec
from keyhole.data.tasks.question import class_names, find_labels
from keyhole.errors import UserError

SST2, MNLI = read_spec("sst2"), read_spec("mnli")


def config(*names: str, **changes: object) -> hf.BertConfig:
    return hf.BertConfig(num_labels=len(names), id2label=dict(enumerate(names)), **changes)


def test_names_are_the_datas_words() -> None:
    """Or the candidates where it has numbers only; a value is one number."""
    assert class_names(SST2) == ("negative", "positive")
    assert class_names(read_spec("boolq")) == ("false", "true")
    assert class_names(read_spec("stsb")) == ("score",)
    assert class_names(read_spec("stsb"), 6) == ("0", "1", "2", "3", "4", "5")


def test_labels_are_matched_by_name() -> None:
    """In the model's order, whatever the case; its own names stay."""
    found = find_labels([MNLI], config("CONTRADICTION", "NEUTRAL", "ENTAILMENT"))
    assert found.order == (2, 1, 0) and found.names == ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")
    assert find_labels([SST2], config("great", "negative")).order == (1, 0)


def test_labels_without_names_are_matched_by_number() -> None:
    """They get the task's names."""
    found = find_labels([SST2], config("LABEL_0", "LABEL_1"))
    assert found.order == (0, 1) and found.names == ("negative", "positive")


def test_other_names_are_refused_unless_a_head_is_asked_for() -> None:
    """Nobody can know whether `ham` is negative."""
    with pytest.raises(UserError, match="its labels are ham, spam .* task sst2 are negative, positive"):
        find_labels([SST2], config("ham", "spam"))
    assert find_labels([SST2], config("ham", "spam"), head_asked=True).names == ("negative", "positive")


def test_tasks_of_one_head_have_the_same_labels() -> None:
    """rte and qnli do, sst2 and rte do not, nor do sst2 and mnli, which has three."""
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
    """When labels are looked for, which is before training."""
    head = "columns: {x: x, label: label}\nprompt: '{{ x }}'\nmetric: accuracy\n"
    spec = parse_spec(f"{head}candidates: {candidates}\n", "own", "own.yaml")
    with pytest.raises(UserError, match="task own: two of its labels have one name"):
        class_names(spec)
