"""Checkpoints and journals: what a run writes so that it can go on, and how it finds its way back.

    files.py      checkpoint-N/: a Hugging Face directory, the optimizer's tensors, and keyhole_state.json
    select.py     which checkpoints a directory holds, which of them are whole, and which are deleted
    snapshot/     a checkpoint that is written while training goes on
    journal/      a zeroth-order run as one record per step: format, writer, replay, and where to resume

Durable writes, checksums and safetensors files are in keyhole/disk; the Hugging Face directory itself is written by
model/weights/save.py; which settings may change on resume is in training/resume.py.
"""
