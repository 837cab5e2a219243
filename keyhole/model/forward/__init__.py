"""Forward passes of the unmodified module while units are streamed.

hooks.py        where the module's forward calls the engine
lockstep.py     several passes that advance together        generate.py    one pass
evaluation.py   losses, likeliest tokens and logits         low_rank.py    linear layers with low-rank factors
binding.py      what parameters point to                    head.py        hidden states -> logits, in chunks
device_weights.py   a unit's weights on the device, in the dtype of compute
row_tiles.py, fused_relu.py, graphs.py, compile.py          blocks with less memory, fewer kernels, fewer launches
frozen_start.py     blocks before the first trained weight, once for all looks
masks.py        no attention mask in a captured pass where the eager one has none
experts.py      mixtures of experts, one expert at a time
memory.py       the device bytes of forward passes
"""
