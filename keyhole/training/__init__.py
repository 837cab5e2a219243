"""The training loop and its parts.

start.py         how a run starts, and all checks before torch is imported: config, directory, resume point, data paths;
                 whether it is the same run: settings that may change, the original model's hash, ranks that differ
build.py         from the data to the loop, in the order in which it happens
model_and_method.py   the model and the method as the config says, and the lines printed at the start
run.py           a run as its loops and observers know it; the leader's commands to the other ranks
loop.py          the loop that all methods share: the leader's, and that of the other ranks
rundir.py        the output directory: whether a run may write to it, the files in run/, the lock
schedule.py      the learning rate as a function of the step
metrics.py       the numbers of a step, read one step late, checked
records.py       run/metrics.jsonl, and the journal of a zeroth-order run
reports.py       the page (run/report.html); trackers.py and display.py
checks.py        that every trained tensor changes, memory and pace against the plan, and a loss that rises
evaluation.py    evaluations of a run, the published model and its test, sample answers
validation.py    the numbers of evaluations; the best step, early stopping, the time limit
saving.py        when a checkpoint is written, whether the disk has room, and what happens when it fails
signals.py       SIGINT, SIGTERM, SIGHUP: finish the step, save, exit
planning.py      questions to the planner; plan_request.py: the arguments of `keyhole plan`, checked without torch
"""
