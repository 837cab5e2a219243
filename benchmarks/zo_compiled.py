"""Zeroth-order steps of a Llama-7B shape, plain and with compiled blocks, resident.

    python benchmarks/zo_compiled.py [--batch 4] [--length 1024]

A Llama block has more operations between its matrix products than an OPT block (`keyhole bench zo`): norms in fp32,
rotary embeddings, a gated activation. Floor: the products of both passes at the rate of one large product of the same
run.
"""

import argparse

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.worker import product_rate
from keyhole.bench.shapes import LLAMA, LLAMA_VOCABULARY, llama_config

WARM_UP, TIMED = 4, 5


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--batch", type=int, default=4)
    ask.add_argument("--length", type=int, default=1024)
    args = ask.parse_args()
    device = torch.device("cuda", 0)
    width, blocks, _, mlp = LLAMA["7B"]
    tokens = args.batch * args.length
    flop = 2 * 2 * tokens * (blocks * (4 * width**2 + 3 * width * mlp) + LLAMA_VOCABULARY * width)
    floor_s = flop / product_rate(device)
    model = keyhole.load(llama_config("7B"), init="random", dtype="bfloat16", device=device)
    batch = measure.random_batch(args.batch, args.length, LLAMA_VOCABULARY)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {args.batch} x {args.length} tokens")
    for compiled in (False, True):
        method = keyhole.ZO(model, 1e-7, compile=compiled)
        found = measure.time_steps(lambda m=method: m.step(batch), model.engine, WARM_UP, TIMED)
        what = "compiled" if compiled else "plain"
        print(f"{what:>8}: {found['step_s']:.4f} s, {found['step_s'] / floor_s:.2f}x of its products", flush=True)
        method.flush()
    model.close()


if __name__ == "__main__":
    main()
