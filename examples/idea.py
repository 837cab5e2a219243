"""The idea of keyhole in plain PyTorch: train a Hugging Face decoder whose blocks stay in host memory.

    python examples/idea.py MODEL_DIRECTORY TEXT_FILE lomo|zo [STEPS]

A decoder is a list of blocks between an embedding and a head. The blocks' weights lie in host memory, one flat tensor
per block. The GPU has two slots of a block's size: while it computes in one, the next block comes into the other, and
what has changed goes back. Embedding, norm and head stay on the GPU. GPU memory: two blocks, whatever the model.

    lomo   forward: a block is visited once, and only its input is kept. Backward: blocks arrive in reverse order, run
           again with gradients, and each weight is updated the moment its gradient exists. No gradient is kept.
    zo     no backward pass: z is noise from a seed, g = (loss(w + eps z) - loss(w - eps z)) / 2 eps, w <- w - lr g z.
           Both passes go through a block while it is there, and its update waits for its next visit: one visit per
           step, and an update is remembered by two numbers, its seed and g.

Over the link per step, in bytes of the blocks' weights: lomo twice up, once down; zo once up, once down.
"""

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

GPU = torch.cuda.is_available()


class Slots:
    """Two buffers on the device that blocks pass through. Copies run on a stream of their own, in order."""

    def __init__(self, blocks: nn.ModuleList, device: torch.device) -> None:
        self.parameters = [list(block.parameters()) for block in blocks]
        flat = [torch.cat([p.data.reshape(-1) for p in block]) for block in self.parameters]
        self.home = [block.pin_memory() if GPU else block for block in flat]
        largest = max(home.numel() for home in self.home)
        self.buffers = [torch.empty(largest, dtype=flat[0].dtype, device=device) for _ in range(2)]
        self.holds: list[int | None] = [None, None]  # the block in each buffer
        self.copies = torch.cuda.Stream() if GPU else None
        for i, home in enumerate(self.home):
            self.bind(i, home)

    def bind(self, i: int, flat: Tensor) -> None:
        """Makes the block's parameters views of this memory."""
        for p, part in zip(self.parameters[i], flat.split([p.numel() for p in self.parameters[i]]), strict=True):
            p.data = part.view(p.shape)

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Starts a copy after the kernels so far, and after the copies so far."""
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            to.copy_(source, non_blocking=True)

    def upload(self, i: int, slot: int) -> None:
        if self.holds[slot] != i:
            self.holds[slot] = i
            self.copy(self.buffers[slot][: self.home[i].numel()], self.home[i])

    def visit(self, i: int, after: int) -> None:
        """Brings the block's weights to the device; the block that comes after it starts on its way meanwhile."""
        slot = self.holds.index(i) if i in self.holds else 0
        self.upload(i, slot)
        if self.copies is not None:
            torch.cuda.current_stream().wait_stream(self.copies)
        self.upload(after % len(self.home), 1 - slot)
        self.bind(i, self.buffers[slot][: self.home[i].numel()])

    def leave(self, i: int, changed: bool) -> None:
        """No later kernel uses the block; what has changed goes home."""
        if changed:
            self.copy(self.home[i], self.buffers[self.holds.index(i)][: self.home[i].numel()])
        self.bind(i, self.home[i])


class StreamedBlock(torch.autograd.Function):
    """A block whose forward pass keeps only its input, and whose backward pass runs it again and updates it."""

    @staticmethod
    def forward(ctx, hidden, slots, i, run, kwargs):
        ctx.hidden, ctx.slots, ctx.i, ctx.run, ctx.kwargs = hidden.detach(), slots, i, run, kwargs
        slots.visit(i, after=i + 1)
        out = run(hidden, **kwargs)  # without gradients, as all of an autograd function
        slots.leave(i, changed=False)
        return out

    @staticmethod
    def backward(ctx, grad):
        ctx.slots.visit(ctx.i, after=ctx.i - 1)
        hidden = ctx.hidden.requires_grad_()
        with torch.enable_grad():
            out = ctx.run(hidden, **ctx.kwargs)
        torch.autograd.backward(out, grad)  # every parameter's hook updates it and drops its gradient
        ctx.slots.leave(ctx.i, changed=True)
        return hidden.grad, None, None, None, None


def lomo(model: nn.Module, blocks: nn.ModuleList, slots: Slots, lr: float) -> Callable[[dict], float]:
    def update(p: Tensor) -> None:
        p.data.add_(p.grad, alpha=-lr)
        p.grad = None

    for i, block in enumerate(blocks):
        run = block.forward
        block.forward = lambda hidden, i=i, run=run, **kwargs: StreamedBlock.apply(hidden, slots, i, run, kwargs)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(batch: dict) -> float:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        return loss.item()

    return step


def torch_noise(seed: int, name: str, like: Tensor) -> Tensor:
    """z of a tensor: the same whenever it is asked for."""
    generator = torch.Generator(like.device).manual_seed(seed * 1_000_003 + sum(name.encode()))
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


def zo(model: nn.Module, blocks: nn.ModuleList, slots: Slots, lr: float, eps: float = 1e-3, noise=torch_noise):
    names = {p: name for name, p in model.named_parameters()}
    count, g = 0, 0.0  # steps so far, and the last one's slope, whose update the blocks still owe

    def both(module: nn.Module, run: Callable, i: int | None, *args, **kwargs) -> Tensor:
        """Runs a module with w + eps z on the first half of the rows, and with w - eps z on the second."""
        rows, weights, outs = args[0].shape[0], list(module.parameters()), []
        if i is not None:
            slots.visit(i, after=i + 1)
            for p in weights if g else ():
                p.data.add_(noise(count - 1, names[p], p), alpha=-lr * g)
        clean = [p.data for p in weights]
        for k, shift in enumerate((eps, -eps)):
            for p, w in zip(weights, clean, strict=True):
                p.data = w.add(noise(count, names[p], w), alpha=shift)
            half = lambda x: x.chunk(2)[k] if isinstance(x, Tensor) and x.ndim and x.shape[0] == rows else x  # noqa
            outs.append(run(*map(half, args), **{key: half(x) for key, x in kwargs.items()}))
        for p, w in zip(weights, clean, strict=True):
            p.data = w
        if i is not None:
            slots.leave(i, changed=bool(g))
        return torch.cat(outs)

    inside = set(blocks.modules())
    others = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    for i, module in [*enumerate(blocks), *((None, module) for module in others)]:
        module.forward = partial(both, module, module.forward, i)

    @torch.no_grad()
    def step(batch: dict) -> float:
        nonlocal count, g
        logits = model(input_ids=batch["input_ids"].repeat(2, 1), use_cache=False).logits
        size, labels = model.config.vocab_size, batch["labels"]
        plus, minus = (model.loss_function(y, labels, vocab_size=size).item() for y in logits.chunk(2))
        g = (plus - minus) / (2 * eps)
        for p in {p for module in others for p in module.parameters(recurse=False)}:  # on the GPU: updated at once
            p.data.add_(noise(count, names[p], p), alpha=-lr * g)
        count += 1
        return (plus + minus) / 2

    return step


def streamed(model: nn.Module, method: Callable, **options) -> Callable[[dict], float]:
    """step(batch) -> loss. The longest list of modules streams; all else moves to the device."""
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    device, inside = torch.device("cuda" if GPU else "cpu"), set(blocks.parameters())
    for tensor in [*(p for p in model.parameters() if p not in inside), *model.buffers()]:
        tensor.data = tensor.data.to(device)
    return method(model.train(method is lomo), blocks, Slots(blocks, device), **options)


if __name__ == "__main__":
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(sys.argv[1])(open(sys.argv[2]).read(), return_tensors="pt")["input_ids"][0]
    method, lr = {"lomo": (lomo, 5e-3), "zo": (zo, 1e-6)}[sys.argv[3]]
    step = streamed(AutoModelForCausalLM.from_pretrained(sys.argv[1]), method, lr=lr)
    for n, rows in enumerate(ids.unfold(0, 128, 128).split(4)[: int((sys.argv[4:] or ["20"])[0])]):
        rows = rows.cuda() if GPU else rows
        print(f"step {n + 1}: loss {step({'input_ids': rows, 'labels': rows}):.4f}")
