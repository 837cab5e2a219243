"""A zeroth-order run as one record per step.

format.py         the file: header, records, checksums
writer.py         records appended, and flushed to the disk behind training
replay.py         from base weights and a journal to the weights after any step
resume_point.py   where a run goes on from: a checkpoint and the records behind it
"""
