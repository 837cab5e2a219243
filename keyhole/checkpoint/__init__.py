"""Checkpoints and journals: what a run writes so that it can be resumed, and how a resume finds its starting point.

    state.py      keyhole_state.json: its content, and whether every file beside it is intact
    select.py     which checkpoints a directory has, which of them are intact, and which are deleted
    writer.py     the only writer of checkpoint-N/: while training goes on, or while it waits
    snapshot.py   the weights of one step, written while later steps change them (copy on write)
    journal.py    a zeroth-order run as one record per step; replay.py: from it to the weights
    resume.py     where a run resumes: a checkpoint and the later records

A checkpoint is an ordinary Hugging Face model directory with optimizer.safetensors, the method's tensors (if it has
any), and keyhole_state.json. It is written under a temporary name, flushed, and renamed. keyhole/disk has durable
writes, checksums and safetensors files; training/start.py decides which settings may change on resume.
"""
