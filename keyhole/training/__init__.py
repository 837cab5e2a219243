"""The training loop and its parts.

start.py         how a run starts, and all checks before torch is imported: config, directory, resume point, data paths
build.py         from the data to the loop, in the order in which it happens
model_and_method.py   the model and the method as the config says, and the workload that memory is planned for
loop.py          the loop that all methods share; observer.py: what reacts to its steps
follow.py        the ranks of a run: the leader's commands, and the loop of the others
rundir.py        the output directory: whether a run may write to it, the files in run/, the lock
base_hash.py, sameness.py, resume.py   the original model's hash; ranks that differ; settings that may change on resume
schedule.py      the learning rate as a function of the step
metrics.py       one entry per step, read one step late, checked, appended to run/metrics.jsonl
journaling.py    writes the journal of a zeroth-order run
reports.py       the page (run/report.html), trackers.py and display.py; plot.py: run/loss.png
checks.py        that every trained tensor changes, memory and pace against the plan, and a loss that rises
evaluation.py    evaluations of a run, the published model and its test; validation.py: their numbers; sample_answers.py
selection.py     the best step, early stopping, the time limit
saving.py        when a checkpoint is written, whether the disk has room, and what happens when it fails
signals.py       SIGINT, SIGTERM, SIGHUP: finish the step, save, exit
planning.py      questions to the planner; plan_request.py: the arguments of `keyhole plan`, checked without torch
start_block.py   the lines printed at the start
"""
