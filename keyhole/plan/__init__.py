"""What a run needs and what the machine has: where every unit lives, and how many bytes that takes.

placement.py   which units stay on the device, and which are streamed
dtype.py       which dtype a model is computed in
outside.py     what of a model is not its blocks, for the start block
experts.py     how experts are moved, for the start block
refusals.py    what a budget that is too small is told

The byte formulas are beside the code they describe: model/forward/memory.py, model/backward/memory.py, and memory.py
in the folder of a method. What the machine has is in machine/host.py.
"""
