"""The sweep over every causal language model of the installed Transformers, and the table that it writes.

    python -m tests.families.sweep            all types, about 15 minutes on one core; writes docs/families.md
    python -m tests.families.sweep llama bert these alone; their rows are replaced

Every type runs in a process of its own, with a time limit, so that none can stop the others.
"""

import multiprocessing
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.families.checks import outcome
from tests.families.tiny import TYPES

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
LIMIT_S = 180
PASSES, MOST_TOLD = "passes", 190
ROW = re.compile(r"^\| `(\S+)` \| (.+) \|$", re.MULTILINE)


def run(types: list[str]) -> Iterator[tuple[str, str]]:
    """(type, outcome) of each, in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.families.checks"])
    for model_type in types:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(model_type, sender), daemon=True)
        child.start()
        sender.close()
        try:
            found = receiver.recv() if receiver.poll(LIMIT_S) else f"failed: no end after {LIMIT_S} s"
        except EOFError:
            found = "failed: the process died"
        child.kill()
        child.join()
        yield model_type, found


def _child(model_type: str, sender: Any) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sender.send(outcome(model_type))


def table() -> dict[str, str]:
    """Type -> outcome, as docs/families.md says."""
    text = PAGE.read_text()
    _, _, passing = text.partition("## Types that pass\n")
    found = dict(ROW.findall(text)) | dict.fromkeys(re.findall(r"`(\S+)`", passing), PASSES)
    return dict(sorted(found.items()))


PAGE_TEXT = """# Model families

Of the {count} causal language models that Transformers {transformers} knows, {passes} pass. The table is written by
`python -m tests.families.sweep`, which builds a tiny random model of every type, without downloads, and checks three
things on a CPU (PyTorch {torch}):

- one step of LOMO in float32 is one step of torch's SGD on the same module from Transformers, every weight to 1e-5;
- two steps of LOMO on a model that is streamed in single matrices and experts give the bits of the resident one;
- so do two steps of ZO.

Encoders (BERT and its kin) are built as decoders, and of an encoder-decoder (BART) its decoder alone. *Refused* is an
error that says why; *failed* is what does not work today; *not built*: no tiny config was found. Parts that tokens
never reach (towers, attention to an encoder) are frozen, and the start block says so. `pytest -m families
tests/families` compares this table with what is installed.

**Mixtures of experts.** Experts are units of their own ([methods.md](methods.md#mixtures-of-experts)) in the modules
that Transformers marks with `use_experts_implementation`: Mixtral, Qwen2, 3, 3.5 and Next MoE, OLMoE, gpt-oss (with its
biases), DeepSeek V2 to V4, GLM-4 MoE, MiniMax, Granite MoE, Phi-MoE, Jamba, Nemotron-H, LFM2 MoE and some thirty more;
in this table their stacks count as large, whatever their size. Llama 4, DBRX, JetMoE and LongCat compute their experts
in ways of their own: there a stack, or all of them, is one unit, and the start block says so.

| type | result |
|---|---|
{rows}

## Types that pass

{passing}
"""


def page(found: dict[str, str]) -> str:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    passes = [f"`{model_type}`" for model_type, result in found.items() if result == PASSES]
    others = {
        model_type: result.replace("|", "/")[:MOST_TOLD] for model_type, result in found.items() if result != PASSES
    }
    rows = "\n".join(f"| `{model_type}` | {result} |" for model_type, result in others.items())
    told = textwrap.fill(", ".join(passes), 120, break_long_words=False, break_on_hyphens=False)
    return PAGE_TEXT.format(count=len(found), passes=len(passes), rows=rows, passing=told, **versions)


def main() -> None:
    found = table() if sys.argv[1:] else {}
    for model_type, result in run(sys.argv[1:] or TYPES):
        found[model_type] = result
        print(f"{model_type}: {result}", flush=True)
    PAGE.write_text(page(dict(sorted(found.items()))))


if __name__ == "__main__":
    main()
