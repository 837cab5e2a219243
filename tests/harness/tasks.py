"""Five tasks for the harness, one per kind of request, each a YAML file over rows that lie beside it."""

import json
from pathlib import Path
from typing import Any

WORDS = ("red", "blue", "warm", "cold", "bread", "soup", "stamp", "letter", "kind", "late")


def _rows(count: int) -> list[dict[str, Any]]:
    rows = []
    for i in range(count):
        a, b, c = (WORDS[(i * k + k) % len(WORDS)] for k in (1, 3, 7))
        rows.append(
            {
                "question": f"The {a} {b} was {c}.\nStamp:",
                "letters": ["A", "B", "C", "D"],
                "choices": [f" {a}", f" {b} and {c}", f" not {a} but {b}"],
                "answer": i % 3,
                "text": " ".join([f"The {a} was {b}, and the {c} came {a}."] * (1 + i % 4)),
                "word": c,
            }
        )
    return rows


COMMON = "dataset_path: json\ntest_split: test\nmetadata: {version: 1}\n"
CHOICE = "output_type: multiple_choice\n"
TASKS = {
    "letters": CHOICE
    + """doc_to_text: "{{question}} A, B, C or D? Answer:"
doc_to_choice: "{{letters}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "phrases": CHOICE
    + """doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
num_fewshot: 2
fewshot_split: test
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "last_word": """output_type: loglikelihood
doc_to_text: "{{question}} {{text}}"
doc_to_target: " {{word}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "stream_of_text": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "written": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}]
""",
}


def write_tasks(directory: Path, count: int = 10) -> list[str]:
    """Writes the files; returns the paths of the tasks."""
    data = directory / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in _rows(count)))
    for name, text in TASKS.items():
        kwargs = f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        (directory / f"{name}.yaml").write_text(f"task: {name}\n{COMMON}{kwargs}{text}")
    return [str(directory / f"{name}.yaml") for name in TASKS]
