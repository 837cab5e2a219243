"""`keyhole bench snapshots`: background checkpoints during training.

run.py      the modes, one after the other        loops.py    the loops that are timed: keyhole's, and MeZO's
disk.py     the write rate of the disk            report.py   a line per mode, and the table
"""
