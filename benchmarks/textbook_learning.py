"""A textbook MeZO loop on a task, beside `zo`: same prompts, same batches, same objective, plain PyTorch otherwise.

    python benchmarks/textbook_learning.py MODEL TASK_DATA [--task sst2] [--lr 4e-5] [--steps 3000] [--seeds 0,1,2]
                                           [--freeze NAME,NAME]      as keyhole's `freeze`

The data are those of `keyhole train task=...` with these settings, in the same order. The model is the Hugging Face
module, all of it on the device, its parameters views of one vector w. A step is MeZO's Algorithm 1:

    z ~ N(0, 1)    w += eps z    l+ = loss(w)    w -= 2 eps z    l- = loss(w)    w += eps z
    w -= lr (l+ - l-) / (2 eps) z

with z from torch's own generator, drawn once per step and kept (MeZO draws it four times from one seed, to save
memory), and the loss over candidates from full logits. Rows are padded on the right, so a causal mask is all they need.
On a GPU the loss of each shape of batches is a CUDA graph: the same kernels, launched at once, because from Python they
would take four times as long. Accuracy on the test questions is scored by keyhole, as for every method.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.config import TrainConfig, resolve
from keyhole.data.run import load_data
from keyhole.data.settings import data_settings
from keyhole.model.structure.reach import freeze
from keyhole.training.validation import Judge

NAMES = ("input_ids", "labels", "question", "answer")
Batch = Mapping[str, torch.Tensor]


def candidates_loss(module: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Cross-entropy over the candidates' mean token log-likelihoods."""
    length = batch["input_ids"].shape[1]
    hidden_TT = torch.full((length, length), -torch.inf, device=batch["input_ids"].device).triu(1)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": hidden_TT[None, None]}
    logits_MV = module(**inputs, use_cache=False).logits.flatten(0, 1).float()
    next_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)  # position t predicts token t + 1
    nll_BT = F.cross_entropy(logits_MV, next_BT.flatten(), ignore_index=-100, reduction="none").view(next_BT.shape)
    score_B = -nll_BT.sum(1) / (next_BT != -100).sum(1)
    question_B, right_B = batch["question"], batch["answer"] == 1
    same_BB = question_B[:, None] == question_B[None, :]
    log_p_B = score_B - torch.where(same_BB, score_B[None, :], -torch.inf).logsumexp(1)
    return -torch.where(right_B, log_p_B, 0.0).sum() / right_B.sum()


def flattened(module: torch.nn.Module) -> torch.Tensor:
    """One vector with all trained parameters, which become views of it."""
    params = [p for p in module.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in params])
    begin = 0
    for p in params:
        p.data = flat[begin : begin + p.numel()].view(p.shape)
        begin += p.numel()
    return flat


class Losses:
    """The loss of a batch with the current weights; on a GPU by a graph per shape."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.graphs: dict[tuple[int, ...], tuple[Any, dict[str, torch.Tensor], torch.Tensor]] = {}
        self.pool: Any = None

    def of(self, batch: Batch) -> Callable[[], torch.Tensor]:
        """A function that computes the loss of this batch."""
        if self.device.type != "cuda":
            return lambda: candidates_loss(self.module, batch)
        key = tuple(batch["input_ids"].shape)
        if key not in self.graphs:
            self.graphs[key] = self._captured({name: batch[name].to(self.device) for name in NAMES})
        graph, place, loss = self.graphs[key]
        for name in NAMES:
            place[name].copy_(batch[name], non_blocking=True)

        def replayed() -> torch.Tensor:
            graph.replay()
            return loss.clone()

        return replayed

    def _captured(self, place: dict[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries choose their kernels
                candidates_loss(self.module, place)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = candidates_loss(self.module, place)
        self.pool = graph.pool()
        return graph, place, loss


@torch.no_grad()
def mezo_step(w: torch.Tensor, z: torch.Tensor, loss: Callable[[], torch.Tensor], lr: float, eps: float) -> list:
    """One step along z, in place; returns both losses."""
    w.add_(z, alpha=eps)
    plus = loss()
    w.add_(z, alpha=-2 * eps)
    minus = loss()
    w.add_(z, alpha=eps)
    w.addcmul_(z, (plus - minus) / (2 * eps), value=-lr)
    return [plus, minus]


def about(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The settings of keyhole that have the same data in the same order."""
    told = {"method": "zo", "model": args.model, "task": args.task, "task_data": str(args.task_data), "seed": seed}
    told |= {"loss": "candidates", "batch_size": args.batch_size, "num_train": 1000, "num_dev": 300, "num_eval": 1000}
    told |= {"stratify": False} if args.shuffled else {}
    return told | {"max_length": 256, "dtype": "float32", "max_steps": args.steps, "output_dir": "out/textbook"}


def train(args: argparse.Namespace, seed: int) -> None:
    """One run, with a line for every test."""
    begin_s, device = time.perf_counter(), torch.device(args.device)
    config, _ = resolve(TrainConfig(**about(args, seed)))
    data = load_data(data_settings(config, None))
    judge = Judge(data.dev, data.test, config.max_length)
    module = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device).eval()
    freeze(module, args.freeze.split(",") if args.freeze else None)
    w, losses = flattened(module), Losses(module, device)
    z, generator = torch.empty_like(w), torch.Generator(device).manual_seed(seed)
    train_s = time.perf_counter()
    for step in range(1, args.steps + 1):
        (batch,) = next(data.train)
        rate = args.lr * ((args.steps + 1 - step) / args.steps if args.schedule == "linear" else 1.0)
        with torch.no_grad():
            z.normal_(generator=generator)
            found = mezo_step(w, z, losses.of(batch), rate, args.eps)
        if step == args.steps or (args.every and step % args.every == 0):
            loss, now_s = float(found[0]), time.perf_counter()
            tested = scored(judge, args, module)
            pace = f"{(now_s - train_s) / step:.4f} s per step, {now_s - begin_s:.0f} s"
            print(f"seed {seed} step {step}: loss {loss:.4f}, {tested}, {pace}", flush=True)


def scored(judge: Judge, args: argparse.Namespace, module: torch.nn.Module) -> dict[str, Any] | None:
    """The test metrics of the module's weights, by keyhole's evaluation."""
    model = keyhole.load(args.model, dtype="float32", device=args.device)
    try:
        own = dict(module.named_parameters())
        for tensor in model.layout.tensors:
            model.home(tensor).copy_(own[tensor.name].detach())
        return judge.test_metrics(model, lambda: False)
    finally:
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task_data", type=Path)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-5)
    parser.add_argument("--schedule", choices=["constant", "linear"], default="linear")
    parser.add_argument("--shuffled", action="store_true", help="stratify=false, as in runs from before that setting")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--freeze", default="", help="parameters that are not trained, as keyhole's setting")
    parser.add_argument("--eps", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=0, help="test every N steps; 0: at the end")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    for seed in map(int, args.seeds.split(",")):
        train(args, seed)


if __name__ == "__main__":
    main()
