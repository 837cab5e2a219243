"""`keyhole bench`: step times on this machine, with the baseline and the floor beside every number.

A floor is the time that the hardware needs at least, from measured rates.

tables/      the cases or trials, as YAML: one per row; rows.py reads and checks them
zo/          zeroth-order steps: textbook MeZO, resident and streamed, on OPT shapes
gradient/    first-order methods beside torch's own optimizers, on Llama shapes
memory/      weights, gradients, state and activations of a first-order step
layers/      forward, backward and update of one block, on CPU and GPU
snapshots/   background checkpoints during training, beside none and beside torch.save
bias/        how much of a gradient sparse projectors lose, on any model and data
scale        predicted steps on 1 to 64 GPUs
shapes       configs of true shape, by name
process      worker processes: both ends of the pipe
measure      seconds per step, bytes on the device and on the host
rates, link  measured rates of products and copies, and of the link, for the floors
report       JSON and Markdown, rewritten after every record

The targets of our own runs are in benchmarks/targets.py.
"""
