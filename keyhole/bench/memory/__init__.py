"""`keyhole bench memory`: the memory of a training step at its peak, by part.

run.py starts the worker process, worker.py runs the steps, ledger.py assigns every byte to a part, report.py writes the
table.
"""
