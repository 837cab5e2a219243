"""A zeroth-order run as one record per step.

format.py         the file: header, records, checksums
writer.py         appends records, and flushes them to the disk in a thread
replay.py         from base weights and a journal to the weights after any step
asked.py          the paths of `keyhole replay`, checked without torch
resume_point.py   where a run resumes: a checkpoint and the later records
"""
