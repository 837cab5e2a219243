"""Loads model directories with whatever Transformers this interpreter has, without keyhole:

python reload.py JOBS.json    [{"model": DIR, "adapter": DIR or null, "ids": [[..]], "text": ..}, ..], each model's
                              logits of the ids and its own tokens of the text -> JOBS.json.safetensors
"""

import json
import sys
from pathlib import Path
from typing import Any

TEXT = " ".join(f"{a} plus {b} is {a + b}, and the theory of the thing is that." for a, b in ((2, 3), (7, 8), (1, 4)))


def reload(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """ "0.logits", "0.ids", "1.logits", ..."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = {}
    for i, job in enumerate(jobs):
        module = AutoModelForCausalLM.from_pretrained(job["model"], torch_dtype=torch.float32)
        if job["adapter"] is not None:
            from peft import PeftModel

            module = PeftModel.from_pretrained(module, job["adapter"])
        with torch.no_grad():
            found[f"{i}.logits"] = module.eval()(input_ids=torch.tensor(job["ids"])).logits.contiguous()
        found[f"{i}.ids"] = AutoTokenizer.from_pretrained(job["model"])(TEXT, return_tensors="pt")["input_ids"]
    return found


if __name__ == "__main__":
    from safetensors.torch import save_file

    save_file(reload(json.loads(Path(sys.argv[1]).read_text())), f"{sys.argv[1]}.safetensors")
