"""Checkpoints and journals: what a run writes so that it can be resumed, and how a resume finds its starting point.

    files.py      checkpoint-N/: a Hugging Face directory, the optimizer's tensors, and keyhole_state.json
    state.py      keyhole_state.json: its content, and whether every file beside it is intact
    select.py     which checkpoints a directory has, which of them are intact, and which are deleted
    removal.py    deletes a checkpoint; files that keyhole did not write stay
    snapshot/     checkpoints that are written in the background during training
    journal/      a zeroth-order run as one record per step: format, writer, replay, and where to resume

keyhole/disk has durable writes, checksums and safetensors files; model/weights/save.py writes the Hugging Face
directory itself; training/resume.py decides which settings may change on resume.
"""
