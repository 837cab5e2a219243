"""A textbook MeZO loop on a task, beside `zo`: same prompts, same batches, same objective, plain PyTorch otherwise.

    python benchmarks/textbook_learning.py MODEL TASK_DATA [--task sst2] [--lr 8e-6] [--steps 3000] [--seed 0]

The data are those of `keyhole train task=...` with these settings, in the same order. The model is the Hugging Face
module, all of it on the device; a step perturbs its weights in place with noise from torch's own generator, runs two
forward passes, computes the loss over candidates from full logits, then restores and updates the weights (MeZO,
Algorithm 1). Accuracy on the test questions is scored by keyhole, as for every method.
"""

import argparse
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import keyhole
from keyhole.config import TrainConfig, resolve
from keyhole.config.data import data_settings
from keyhole.data.run import load_data
from keyhole.training.validation import Judge


def candidates_loss(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy over the candidates' mean token log-likelihoods."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
    logits_BTV = module(**inputs, use_cache=False).logits[:, :-1].float()
    labels_BT = batch["labels"][:, 1:]
    nll_BT = F.cross_entropy(logits_BTV.transpose(1, 2), labels_BT, ignore_index=-100, reduction="none")
    score_B = -nll_BT.sum(1) / (labels_BT != -100).sum(1)
    question_B, right_B = batch["question"], batch["answer"] == 1
    same_BB = question_B[:, None] == question_B[None, :]
    log_p_B = score_B - torch.where(same_BB, score_B[None, :], -torch.inf).logsumexp(1)
    return -log_p_B[right_B].mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("task_data", type=Path)
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--lr", type=float, default=8e-6)
    parser.add_argument("--schedule", choices=["constant", "linear"], default="constant")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--eps", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    about = {
        "method": "zo",
        "model": args.model,
        "task": args.task,
        "task_data": str(args.task_data),
        "seed": args.seed,
    }
    about |= {"loss": "candidates", "batch_size": 16, "num_train": 1000, "num_dev": 200, "num_eval": 1000}
    about |= {"max_length": 256, "dtype": "float32", "max_steps": args.steps, "output_dir": "out/textbook"}
    config, _ = resolve(TrainConfig(**about))
    data = load_data(data_settings(config, None))
    judge = Judge(data.dev, data.test, config.max_length)
    model = keyhole.load(args.model, dtype="float32", device=args.device)
    module, params = model.module.eval(), [p for p in model.module.parameters() if p.requires_grad]
    generator, seeds = torch.Generator(args.device), torch.Generator().manual_seed(args.seed)

    @torch.no_grad()
    def add_noise(seed: int, scale: float) -> None:
        generator.manual_seed(seed)
        for param in params:
            param.data.add_(torch.randn(param.shape, generator=generator, device=param.device), alpha=scale)

    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        (batch,) = next(data.train)
        batch = {name: x.to(args.device) for name, x in batch.items()}
        seed = int(torch.randint(2**31, (), generator=seeds))
        with torch.no_grad():
            add_noise(seed, args.eps)
            plus = candidates_loss(module, batch)
            add_noise(seed, -2 * args.eps)
            minus = candidates_loss(module, batch)
            add_noise(seed, args.eps)
            rate = args.lr * ((args.steps + 1 - step) / args.steps if args.schedule == "linear" else 1.0)
            add_noise(seed, -rate * float((plus - minus) / (2 * args.eps)))
        if step % args.every == 0 or step == args.steps:
            seconds = time.perf_counter() - begin
            print(
                f"step {step}: loss {float(plus):.4f}, {judge.test_metrics(model, lambda: False)}, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
