"""One question of every shipped task, as Hugging Face's data set has it and as the original download has it.

The texts are made up; the shapes are those of the files: names of columns, nesting, spellings of labels, headers.
"""

import json
from typing import Any, NamedTuple

from keyhole.data.tasks.question import MARK


class Case(NamedTuple):
    """Files by name with their text, each of which holds the same question, and what it must become."""

    files: dict[str, str]
    prompt: str
    candidates: tuple[str, ...]
    answer: int = 0
    also: tuple[int, ...] = ()
    references: tuple[str, ...] = ()
    value: float | None = None


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def tsv(*rows: str) -> str:
    return "".join(row.replace(" | ", "\t") + "\n" for row in rows)


NLI = {"premise": "It rains.", "hypothesis": "It is wet."}
MULTIRC = {"idx": 0, "version": 1.1, "passage": {
    "text": "Ann ate.",
    "questions": [{"question": "Who ate?", "idx": 0, "answers": [
        {"text": "Ann", "idx": 0, "label": 1}, {"text": "Bob", "idx": 1, "label": 0}]}],
}}  # fmt: skip
RECORD_TEXT = "Ann met Bob. @highlight\nIt rained"
RECORD = {"source": "x", "idx": 0, "passage": {
    "text": RECORD_TEXT, "entities": [{"start": 0, "end": 2}, {"start": 8, "end": 10}, {"start": 0, "end": 2}]},
    "qas": [{"query": "@placeholder was met", "idx": 0, "answers": [{"start": 8, "end": 10, "text": "Bob"}]}],
}  # fmt: skip
SQUAD = {"version": "1.1", "data": [{"title": "Rain", "paragraphs": [{"context": "It rains in May.", "qas": [
    {"id": "a", "question": " When? ", "answers": [{"text": "May", "answer_start": 12}, {"text": "in May"}]}]}]}],
}  # fmt: skip
DROP = {"nfl_1": {"passage": "They won 3 to 1.", "wiki_url": "x", "qa_pairs": [{
    "question": "By how many?", "query_id": "q",
    "answer": {"number": "2", "date": {"day": "", "month": "", "year": ""}, "spans": []}}]},
}  # fmt: skip
MNLI_HEAD = (
    "index | promptID | pairID | genre | sentence1_binary_parse | sentence2_binary_parse | sentence1_parse | "
    "sentence2_parse | sentence1 | sentence2 | label1 | gold_label"
)
ALPACA = "Below is an instruction that describes a task"
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n", "entry_point": "f",
    "test": "def check(g):\n    assert g(1) == 1\n",
}  # fmt: skip
INFER = 'Suppose It rains. Can we infer that "It is wet."? Yes, No, or Maybe?\n'
NO_YES = ("No", "Yes")

CASES: dict[str, Case] = {
    "sst2": Case(
        {
            "validation.jsonl": lines({"sentence": 'a "gem" ', "label": 1, "idx": 0}),
            "dev.tsv": tsv("sentence | label", 'a "gem"  | 1'),
        },
        'a "gem" It was', (" terrible", " great"), 1,
    ),
    "rte": Case(
        {
            "validation.jsonl": lines(NLI | {"label": 1, "idx": 0}),
            "val.jsonl": lines(NLI | {"label": "not_entailment", "idx": 0}),
            "dev.tsv": tsv("index | sentence1 | sentence2 | label", "0 | It rains. | It is wet. | not_entailment"),
        },
        'It rains.\nDoes this mean that "It is wet." is true? Yes or No?\n', ("Yes", "No"), 1,
    ),
    "cb": Case(
        {
            "validation.jsonl": lines(NLI | {"label": 2, "idx": 0}),
            "val.jsonl": lines(NLI | {"label": "neutral", "idx": 0}),
        },
        INFER, ("Yes", "No", "Maybe"), 2,
    ),
    "boolq": Case(
        {
            "validation.jsonl": lines({"question": "is it wet", "passage": "It rains.", "idx": 0, "label": 1}),
            "val.jsonl": lines({"question": "is it wet", "passage": "It rains.", "idx": 0, "label": True}),
            "dev.jsonl": lines({"question": "is it wet", "title": "t", "answer": True, "passage": "It rains."}),
        },
        "It rains. Is it wet?\n", NO_YES, 1,
    ),
    "wsc": Case(
        {
            "validation.jsonl": lines({"text": "Ann said She won.", "span1_index": 0, "span2_index": 2,
                                       "span1_text": "Ann", "span2_text": "She", "idx": 0, "label": 1}),
            "val.jsonl": lines({"text": "Ann said She won.", "idx": 0, "label": True, "target": {
                "span1_index": 0, "span2_index": 2, "span1_text": "Ann", "span2_text": "She"}}),
        },
        'Ann said She won.\nIn the previous sentence, does the pronoun "she" refer to Ann? Yes or No?\n', NO_YES, 1,
    ),
    "wic": Case(
        {
            "validation.jsonl": lines({"word": "bank", "sentence1": "A bank.", "sentence2": "The bank.", "start1": 2,
                                       "end1": 6, "start2": 4, "end2": 8, "idx": 0, "label": 0}),
            "val.jsonl": lines({"word": "bank", "sentence1": "A bank.", "sentence2": "The bank.", "start1": 2,
                                "idx": 0, "label": False, "version": 1.1}),
        },
        'Does the word "bank" have the same meaning in these two sentences? Yes, No?\nA bank.\nThe bank.\n', NO_YES,
    ),
    "multirc": Case(
        {
            "validation.jsonl": lines({"paragraph": "Ann ate.", "question": "Who ate?", "answer": "Ann", "label": 1}),
            "val.jsonl": lines(MULTIRC),
        },
        'Ann ate.\nQuestion: Who ate?\nI found this answer "Ann". Is that correct? Yes or No?\n', NO_YES, 1,
    ),
    "copa": Case(
        {
            "validation.jsonl": lines({"premise": "It is wet.", "choice1": "I slept.", "choice2": "The Rain came.",
                                       "question": "cause", "idx": 0, "label": 1}),
            "validation.json": json.dumps([{"premise": "It is wet.", "choice1": "I slept.", "idx": 0,
                                            "choice2": "The Rain came.", "question": "cause", "label": 1}]),
        },
        "It is wet because", (" I slept.", " the Rain came."), 1,
    ),
    "record": Case(
        {
            "validation.jsonl": lines({"passage": RECORD_TEXT, "query": "@placeholder was met",
                                       "entities": ["Ann", "Bob"], "answers": ["Bob"]}),
            "val.jsonl": lines(RECORD),
        },
        "Ann met Bob. - It rained\n-", (" Ann was met", " Bob was met"), 1,
    ),
    "squad": Case(
        {
            "validation.jsonl": lines({"id": "a", "title": "Rain", "context": "It rains in May.", "question": " When? ",
                                       "answers": {"text": ["May", "in May"], "answer_start": [12, 9]}}),
            "dev-v1.1.json": json.dumps(SQUAD),
        },
        "Title: Rain\nContext: It rains in May.\nQuestion: When?\nAnswer:", (" May\n",), references=("May", "in May"),
    ),
    "drop": Case(
        {
            "validation.jsonl": lines({"passage": "They won 3 to 1.", "question": "By how many?",
                                       "answers_spans": {"spans": ["2"], "types": ["number"]}}),
            "drop_dataset_dev.json": json.dumps(DROP),
        },
        "Passage: They won 3 to 1.\nQuestion: By how many?\nAnswer:", (" 2\n",), references=("2",),
    ),
    "cola": Case(
        {
            "validation.jsonl": lines({"sentence": "Go home.", "label": 1, "idx": 0}),
            "dev.tsv": tsv("gj04 | 1 |  | Go home."),
        },
        "Go home.\nIs this sentence grammatically correct? Yes or No?\n", NO_YES, 1,
    ),
    "mrpc": Case(
        {
            "validation.jsonl": lines({"sentence1": 'He said "no.', "sentence2": "No.", "label": 1, "idx": 0}),
            "dev.tsv": tsv("\ufeffQuality | #1 ID | #2 ID | #1 String | #2 String", '1 | 7 | 8 | He said "no. | No.'),
            "msr_paraphrase_test.txt": tsv("Quality | #1 ID | #2 ID | #1 String | #2 String",
                                           '1 | 7 | 8 | He said "no. | No.'),
        },
        'He said "no.\nNo.\nDo these two sentences mean the same? Yes or No?\n', NO_YES, 1,
    ),
    "stsb": Case(
        {
            "validation.jsonl": lines({"sentence1": "A.", "sentence2": "B.", "label": 3.8, "idx": 0}),
            "dev.tsv": tsv("index | genre | filename | year | old_index | source1 | source2 | sentence1 | sentence2 | "
                           "score", "0 | news | x | 2012 | 1 | a | b | A. | B. | 3.800"),
            "sts-dev.csv": tsv("news | x | 2012 | 1 | 3.800 | A. | B.",
                               'news | x | 2012 | 1 | 1.0 | "A, | B. | see licence'),
        },
        "A.\nB.\nHow similar are these two sentences, from 0 (not at all) to 5 (they mean the same)?\n",
        ("0", "1", "2", "3", "4", "5"), 4, value=3.8,
    ),
    "qqp": Case(
        {
            "validation.jsonl": lines({"question1": "Why?", "question2": "How so?", "label": 1, "idx": 0}),
            "dev.tsv": tsv("id | qid1 | qid2 | question1 | question2 | is_duplicate", "1 | 2 | 3 | Why? | How so? | 1"),
            "quora_duplicate_questions.tsv": tsv(
                '"id" | "qid1" | "qid2" | "question1" | "question2" | "is_duplicate"',
                '"0" | "1" | "2" | "Why?" | "How so?" | "1"', '"1" | "3" | "4" | "Is ""it""\n?" | "What?" | "0"'),
        },
        "Why?\nHow so?\nDo these two questions ask the same? Yes or No?\n", NO_YES, 1,
    ),
    "mnli": Case(
        {
            "validation_matched.jsonl": lines(NLI | {"label": 1, "idx": 0}),
            "dev_matched.tsv": tsv(MNLI_HEAD, "0 | 1 | 2 | f | - | - | - | - | It rains. | It is wet. | neutral | "
                                   "neutral"),
            "multinli_1.0_dev_matched.jsonl": lines({"sentence1": "It rains.", "sentence2": "It is wet.",
                                                     "gold_label": "neutral", "annotator_labels": []}),
        },
        INFER, ("Yes", "Maybe", "No"), 1,
    ),
    "qnli": Case(
        {
            "validation.jsonl": lines({"question": "When?", "sentence": "In May.", "label": 0, "idx": 0}),
            "dev.tsv": tsv("index | question | sentence | label", "0 | When? | In May. | entailment"),
        },
        'In May.\nDoes this answer the question "When?"? Yes or No?\n', ("Yes", "No"),
    ),
    "trec": Case(
        {
            "test.jsonl": lines({"text": "Who won ?", "coarse_label": 3, "fine_label": 29}),
            "test.json": json.dumps([{"text": "Who won ?", "label-coarse": 3, "label-fine": 3}]),
            "TREC_10.label": "HUM:ind Who won ?\n",
        },
        "Question: Who won ?\nThe question asks for",
        (" an abbreviation", " a thing", " a description", " a person", " a place", " a number"), 3,
    ),
    "agnews": Case(
        {
            "test.jsonl": lines({"text": "Cup won It was close, again", "label": 1}),
            "test.csv": '"2","Cup won","It was close, again"\n',
        },
        "Cup won It was close, again\nTopic:", (" World", " Sports", " Business", " Technology"), 1,
    ),
    "subj": Case(
        {
            "test.jsonl": lines({"text": "a dull film", "label": 1, "label_text": "subjective"}),
            "test.csv": "sentence,label\na dull film,1\n",
            "test.tsv": tsv("sentence | label", "a dull film | subjective"),
        },
        "a dull film This is", (" objective", " subjective"), 1,
    ),
    "alpaca": Case(
        {
            "validation.jsonl": lines({"instruction": "Say hi.", "input": "", "output": "Hi!", "text": "x"}),
            "test.json": json.dumps([{"instruction": "Say hi.", "output": "Hi!"}]),
        },
        f"{ALPACA}. Write a response that appropriately completes the request.\n\n### Instruction:\nSay hi.\n\n"
        "### Response:\n", ("Hi!",), references=("Hi!",),
    ),
    "gsm8k": Case(
        {
            "test.jsonl": lines({"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}),
            "test.json": json.dumps([{"question": "2+2?", "answer": "It is <<2+2=4>>4.\n#### 4"}]),
        },
        "Question: 2+2?\nAnswer:", (" It is <<2+2=4>>4.\n#### 4",), references=("It is <<2+2=4>>4.\n#### 4",),
    ),
    "humaneval": Case(
        {"test.jsonl": lines(HUMANEVAL), "HumanEval.jsonl": lines(HUMANEVAL)},
        "def f(x):\n", ("    return x\n",),
        references=(f"def f(x):\n{MARK}\n\ndef check(g):\n    assert g(1) == 1\n\n\ncheck(f)\n",),
    ),
    "demo": Case(
        {
            "test.jsonl": lines({"prompt": "Stamp:", "candidates": [" blue", " red"], "label": 1}),
            "test.json": json.dumps([{"prompt": "Stamp:", "candidates": [" blue", " red"], "answer": 1}]),
        },
        "Stamp:", (" blue", " red"), 1,
    ),
}  # fmt: skip
