"""What `keyhole bench` runs: steps timed on this machine, with the baseline and the floor beside every number.

tables/      what is run, as YAML: one case or trial per row; rows.py reads and checks them
zo/          zeroth-order steps: textbook MeZO, resident and streamed, on OPT shapes
gradient/    first-order methods beside torch's own optimizers, on Llama shapes
memory/      weights, gradients, state and activations of a first-order step
layers/      forward, backward and update of one block, on CPU and GPU
snapshots/   checkpoints written while training goes on, beside none and beside torch.save
bias/        how much of a gradient sparse projectors lose, on any model and data
shapes       configs of true shape, by name
process      worker processes: both ends of the pipe
measure      seconds per step, bytes on the device and on the host
rates, link  what floors are made of: rates of products and copies, and of the link
report       JSON and Markdown, written anew after every record

What our own runs are held to is not here: benchmarks/targets.py.
"""
