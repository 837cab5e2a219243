"""The training loop and its parts.

start.py         how a run starts, and all checks before torch is imported: config, directory, resume point, data paths
request.py       what a run is asked to do, as start.py hands it to build.py
build.py         builds data, model, method, journal and loop
model_and_method.py   the model and the method as the config says, and the workload that memory is planned for
base_hash.py     the hash of the original model, computed in the background
waiting.py       progress lines during the start
observer.py      what reacts to the steps of a run
loop.py          the loop that all methods share: step, check, evaluation, save
crew.py          how the leader makes the other ranks take part; follow.py: the other ranks
sameness.py      ranks that would train something else are refused
resume.py        which settings may change when a run is resumed
rundir.py        the output directory: whether a run may write to it, and the files in run/
lock.py          one process per directory
schedule.py      the learning rate as a function of the step
metrics.py       one entry per step, read one step late, checked, appended to run/metrics.jsonl
reports.py       sends a step's metrics to the metrics file, the page, the trackers and the display
run_page.py      run/report.html; page_facts.py, sample_answers.py: its contents besides the curves
guard.py         stops a run at numbers that are not finite
divergence.py    warns if the loss has risen far
change_check.py  checks that every trained tensor changes
selection.py     the best step, early stopping, the time limit
validation.py    loss and perplexity on held-out data, metrics of tasks
journaling.py    writes the journal of a zeroth-order run
saving.py        when a checkpoint is written, whether the disk has room, and what happens when it fails
signals.py       SIGINT, SIGTERM, SIGHUP: finish the step, save, exit
plan_request.py  the arguments of `keyhole plan`, checked before torch is imported
planning.py      turns these arguments into a question to the planner; predicts the step time of a run
start_block.py   the lines printed at the start
display.py       lines and the progress bar
trackers/        TensorBoard, W&B, MLflow, trackio
plot.py          run/loss.png
"""
