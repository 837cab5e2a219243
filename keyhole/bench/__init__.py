"""`keyhole bench`: step times on this machine, with the baseline and the floor beside every number.

A floor is the time that the hardware needs at least, from measured rates. A measurement is a row of a table: a case
(cases.py, tables/*.yaml) says what runs, a function measures it in a worker process, a report shows it.

cases.py        the rows of every table               process.py      worker processes
shapes.py       configs of true shape, by name        report.py       records as JSON and Markdown, and their tables
measure.py      seconds per step, bytes, rates        baselines.py    MeZO's loop, torch's optimizers

run.py                       which function and which report a verb has
steps.py, step_tables.py     zo, lomo, lsp: whole steps, resident and streamed, beside the baselines
memory.py                    memory: weights, gradients, state and activations of a step
layers.py                    layers: forward, backward and update of one block, on CPU and GPU
snapshots.py                 snapshots: background checkpoints during training, beside none and beside torch.save
bias.py                      lsp-bias: how much of a gradient sparse projectors lose, on any model and data
"""
