"""Forward passes of the unmodified module while units are streamed.

hooks.py        where the module's forward calls the engine; forwards and hooks are installed and removed
lockstep.py     several passes that advance together
evaluation.py   losses, likeliest tokens, logits; generation     head.py     hidden states -> logits, in chunks
binding.py      what parameters point to: a unit's weights on the device, in the dtype of compute
blocks.py       blocks with fewer kernels and launches: compiled, and as CUDA graphs
pieces.py       layers of which a piece is on the device at a time: experts, tiles of rows
memory.py       the device bytes of forward passes
low_rank.py     layers with low-rank factors, for several looks of a zeroth-order step at once
captured.py     a stream per look, and no attention mask where the eager pass has none
"""
