"""Checkpoints and journals: what a run writes so that it can be resumed, and how a resume finds its starting point.

state.py      keyhole_state.json: its content, and whether every file beside it is intact
select.py     which checkpoints a directory has, which of them are intact, and which are deleted
writer.py     the only writer of checkpoint-N/: while training goes on, or while it waits
snapshot.py   the weights of one step, written while later steps change them (copy on write)
journal.py    a zeroth-order run as one record per step; replay.py: from it to the weights
resume.py     where a run resumes: a checkpoint and the later records
"""
