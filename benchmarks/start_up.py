"""From the command to the first step: where the seconds go, in a first and a second run.

    python benchmarks/start_up.py [--model DIR] [--task-data DIR] [--methods zo lomo] [--steps 20] [--out FILE]
                                  [key=value ...]

Without --model a random model of SmolLM2-135M's shape is made, with a tokenizer of 48 thousand tokens; without
--task-data a table of SST-2's size (67,349 rows of made-up sentences). Then, each in a separate process:

    imports     `import torch, transformers`, and the other imports of every transformers model: the floor
    refused     `keyhole train` with a data file that does not exist
    first run   `keyhole train`, 16 ragged rows per step, with an empty cache of data and of Triton's kernels
    second run  the same command again

Each is printed as soon as it is known, the table last. Seconds are counted from the start of the process to a line of
its output: the start block, step 1, and the last step. The phases are the start block's own. The target is for the
second run: step 1 at most 5 s after the imports. Imports take 4 to 11 s on the same machine, from one minute to the
next: so what is subtracted from a run is the time of its own imports, which its start block names.
"""

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keyhole.machine.probe import versions

ALLOWED_S = 5.0  # step 1 beyond the imports
IMPORTS = "import torch, transformers.modeling_utils; from transformers import AutoModelForCausalLM, AutoTokenizer"
SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SHAPE |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192}
ROWS = {"train": 67349, "dev": 872}


def words(count: int, draw: random.Random) -> list[str]:
    """Made-up words of one to four syllables."""
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(count)]


def make_model(path: Path) -> None:
    """A random model of SmolLM2-135M's shape, and a byte-level BPE tokenizer of about as many tokens."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": ["<|end|>"], "initial_alphabet": alphabet, "show_progress": False}
    text = words(60_000, random.Random(0))
    trainer = trainers.BpeTrainer(vocab_size=SHAPE["vocab_size"], **how)
    made.train_from_iterator((" ".join(text[i : i + 50]) for i in range(0, len(text), 50)), trainer)
    ends = {"eos_token": "<|end|>", "pad_token": "<|end|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **ends).save_pretrained(path)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(path)


def make_task(root: Path) -> None:
    """A folder of SST-2's size and form."""
    (root / "SST-2").mkdir(parents=True)
    draw = random.Random(1)
    known = words(2000, draw)
    for split, count in ROWS.items():
        rows = (f"{' '.join(draw.choices(known, k=draw.randint(2, 30)))} \t{draw.randint(0, 1)}" for _ in range(count))
        (root / "SST-2" / f"{split}.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")


def timed(words: list[str], marks: dict[str, str], environment: dict[str, str]) -> tuple[dict[str, float], str]:
    """Seconds from the start of a process to the first line with each mark, and to its end; and what it printed."""
    began_s, found, lines = time.monotonic(), {}, []
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as run:
        for line in run.stdout:
            now_s = time.monotonic() - began_s
            lines.append(line)
            found |= {name: now_s for name, mark in marks.items() if name not in found and re.match(mark, line)}
    return found | {"end": time.monotonic() - began_s}, "".join(lines)


def imports_s(environment: dict[str, str]) -> float:
    """The second of two imports: the first may read from the disk."""
    return [timed([sys.executable, "-c", IMPORTS], {}, environment)[0]["end"] for _ in range(2)][1]


def run_twice(method: str, settings: list[str], steps: int, scratch: Path) -> list[dict[str, float | str]]:
    """The times of a first and a second run, each into an output directory of its own."""
    environment = os.environ | {"KEYHOLE_CACHE": str(scratch / method / "cache")}
    environment |= {"TRITON_CACHE_DIR": str(scratch / method / "triton")}
    config = scratch / f"{method}.yaml"
    config.write_text(f"method: {method}\ntask: sst2\nnum_dev: 100\nnum_eval: 100\nbatch_size: 16\nsave_model: false\n")
    marks = {"start block": r"keyhole \S+: ", "step 1": r"step +1/", "last step": rf"step +{steps}/"}
    found = []
    for which in ("first", "second"):
        own = [f"output_dir={scratch / method / which}", f"max_steps={steps}"]
        command = [sys.executable, "-m", "keyhole", "train", str(config), *settings, *own]
        times, said = timed(command, marks, environment)
        if "last step" not in times:
            raise SystemExit(f"{' '.join(command)} failed:\n{said}")
        phases = next((line.strip() for line in said.splitlines() if line.strip().startswith("start:")), "")
        own_imports = re.search(r"importing torch and transformers ([0-9.]+)", phases)
        times["beyond"] = times["step 1"] - float(own_imports[1])
        print(f"{method}, {which} run: {', '.join(f'{name} {at:.1f} s' for name, at in times.items())}; {phases}")
        found.append({**times, "phases": phases})
    return found


def table(imports: float, refused: float, runs: dict[str, list[dict[str, float | str]]], steps: int) -> str:
    """Markdown."""
    about = ", ".join(f"{name} {version}" for name, version in versions().items() if version)
    lines = [f"{platform.node()}, {os.cpu_count()} cores; {about}", "", f"imports alone: {imports:.1f} s"]
    lines += [f"refused (no such data file): {refused:.2f} s", ""]
    lines += [f"| | start block | step 1 | step {steps} | step 1 beyond its imports |", "|---|---|---|---|---|"]
    for method, (first, second) in runs.items():
        for which, one in (("first", first), ("second", second)):
            beyond = one["beyond"]
            judged = "" if which == "first" else f" ({'within' if beyond <= ALLOWED_S else 'beyond'} {ALLOWED_S:g})"
            cells = [f"{one[name]:.1f} s" for name in ("start block", "step 1", "last step")]
            lines.append(f"| `{method}`, {which} run | {' | '.join(cells)} | {beyond:.1f} s{judged} |")
    lines += [""] + [f"{method}, second run: {second['phases']}" for method, (_, second) in runs.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--task-data", type=Path)
    parser.add_argument("--methods", nargs="+", default=["zo", "lomo"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    asked = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        if asked.model is None:
            make_model(scratch / "model")
        if asked.task_data is None:
            make_task(scratch / "tasks")
        settings = [f"model={asked.model or scratch / 'model'}", f"task_data={asked.task_data or scratch / 'tasks'}"]
        imports = imports_s(dict(os.environ))
        print(f"imports alone: {imports:.1f} s", flush=True)
        wrong = scratch / "wrong.yaml"
        wrong.write_text(
            f"method: zo\nmodel: demo\ntrain_data: {scratch}/absent.jsonl\nmax_steps: 1\noutput_dir: {scratch}/x\n"
        )
        refused = timed([sys.executable, "-m", "keyhole", "train", str(wrong)], {}, dict(os.environ))[0]["end"]
        runs = {
            method: run_twice(method, [*settings, *asked.settings], asked.steps, scratch) for method in asked.methods
        }
        text = table(imports, refused, runs, asked.steps)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text)
        asked.out.with_suffix(".json").write_text(json.dumps({"imports_s": imports, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
