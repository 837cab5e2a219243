"""Forward passes of the unmodified module over weights that come and go.

hooks.py        where the module's forward meets the engine
lockstep.py     several passes that advance together        generate.py    one pass
evaluation.py   losses, likeliest tokens and logits         low_rank.py    layers with small matrices beside them
binding.py      what parameters point to                    head.py        hidden states -> logits, in chunks
row_tiles.py, fused_relu.py, graphs.py, compile.py          blocks with less memory, fewer kernels, fewer launches
experts.py      mixtures of experts, one expert at a time
memory.py       the bytes of all this
"""
