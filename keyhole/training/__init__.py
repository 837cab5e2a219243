"""What the training loop is made of, a file each; keyhole/training/loop.py puts the pieces together.

job.py        what is known before the model is loaded: origin, data, number of steps
loading.py    the model, placed as the config says
schedule.py   the learning rate as a function of the step
metrics.py    one record a step: read late, checked, written to run/metrics.jsonl
guard.py      losses and weights that are not finite
change_check.py      whether every trained tensor really changes
evaluate.py   loss and perplexity on held-out data
signals.py    SIGINT and SIGTERM: finish the step, save, leave
rundir.py     the output directory: whose it is, and what goes into run/
lock.py       one process a directory
journaling.py the journal of a zeroth-order run, while it trains
saving.py     when to write a checkpoint, and whether the disk has room
start_block.py      the block that says what was decided
display.py    lines and the progress bar
tracker.py    TensorBoard, where it is asked for
plot.py       run/loss.png
"""
