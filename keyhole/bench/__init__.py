"""Timing on this machine, with the floor beside every number.

shapes      OPT configs by name, 125M to 175B
cases       what is run: one case a line, and the tables made of cases
textbook    the in-memory MeZO loop as published: the baseline
link        measured rates of the link
measure     seconds a step, bytes on the device and on the host
worker      runs cases that share a model, in a process of its own; kept_model: that model
runner      starts workers, keeps the time limit, writes what is known after every case
floors      ratios to the baseline and to max(compute alone, link alone)
judged      targets, and whether they are met
report      JSON and Markdown
snapshots   checkpoints every few steps beside none and torch.save, and a replay; snapshots_report: its table
gradient    first-order methods beside torch's optimizers; lsp: its trials, lsp_bias: projectors on new gradients
crash       kills training again and again, resumes it, and compares
"""
