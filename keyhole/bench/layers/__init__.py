"""`keyhole bench layers`: forward, backward and update of one block, on the CPU and on the GPU.

run.py starts a worker process per model and device, worker.py times the block, report.py writes the tables.
"""
