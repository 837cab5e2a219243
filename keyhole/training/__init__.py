"""The training loop and its parts.

start.py         how a run starts, and all that is refused before torch is imported: config, directory, resume, paths
build.py         what a run is built of: data, model, method, journal, loop
base_hash.py     the hash of the model that a run begins with, computed meanwhile
waiting.py       what a start waits for, with progress
loop.py          the loop that every method shares: step, check, evaluation, save
resume.py        which settings may change when a run goes on
rundir.py        the output directory: whose it is, and what lies in run/
lock.py          one process per directory
schedule.py      the learning rate as a function of the step
metrics.py       one entry per step: read late, checked, appended to run/metrics.jsonl
reports.py       where a step's numbers go: metrics file, tracker, display, curve
guard.py         numbers that are not finite stop a run
change_check.py  whether every trained tensor changes
selection.py     the best step, early stopping, a limit of time
validation.py    loss and perplexity on held-out data
journaling.py    the journal of a zeroth-order run, while it trains
saving.py        when a checkpoint is written, whether the disk has room, and what happens when it fails
signals.py       SIGINT, SIGTERM, SIGHUP: finish the step, save, leave
plan_request.py  what was typed after `keyhole plan`, checked before torch is imported
planning.py      the question behind `keyhole plan`, and the pace that a run is compared with
start_block.py   the lines that say what was decided
display.py       lines and the progress bar
tracker.py       TensorBoard, where it is asked for
plot.py          run/loss.png
"""
