"""Every causal language model that Transformers knows, against SGD and against itself; some of them in every run."""

import pytest
import transformers

from tests.families.checks import CHECKS
from tests.families.sweep import PAGE, run, table
from tests.families.tiny import TYPES
from tests.matrix import in_every_run

FAST = [
    "llama",
    "gpt2",  # tied
    "gemma3",  # with a vision tower that tokens do not reach
    "gemma4_text",  # later blocks use the keys and values of earlier ones
    "mixtral",
    "deepseek_v3",
    "dbrx",  # uses the matrices of a module that it does not enter
    "qwen3_next",  # linear attention and experts
    "zamba2",  # a block that is used twice
    "olmo",  # no vectors at all
    "nanochat",
    "hrm_text",  # two stacks that call each other
    "modernbert-decoder",  # a head with a layer of its own
    "bert",
]


UNUSUAL = ("gemma4_text", "dbrx", "zamba2", "hrm_text", "bert")  # what is shared, entered or called otherwise


@in_every_run(
    lambda model_type, check: check == next(iter(CHECKS)) or (check == list(CHECKS)[2] and model_type in UNUSUAL)
)
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("model_type", FAST)
def test_of_every_kind_a_family(model_type: str, check: str) -> None:
    CHECKS[check](model_type)


def test_the_page_counts_what_it_lists() -> None:
    rows = table()
    passes = [model_type for model_type, result in rows.items() if result == "passes"]
    assert f"Of the {len(rows)} causal language models" in PAGE.read_text()
    assert f"knows, {len(passes)} pass." in PAGE.read_text() and set(FAST) <= set(passes)


def test_the_page_has_every_type_of_its_version() -> None:
    if f"Transformers {transformers.__version__} " not in PAGE.read_text():
        pytest.skip("another version of Transformers is installed")
    assert sorted(table()) == TYPES


@pytest.mark.families
@pytest.mark.parametrize("model_type", TYPES)
def test_a_family_does_what_the_page_says(model_type: str) -> None:
    ((_, found),) = run([model_type])
    expected = table().get(model_type, "passes")
    assert found.partition(":")[0] == expected.partition(":")[0], found
