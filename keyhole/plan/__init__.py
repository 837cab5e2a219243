"""What a run needs and what the machine has: which units stay on the device, and how many bytes and seconds that takes.

placement.py   where a model lives: reads the budget, refuses what cannot fit, and says what was decided
fit.py         the cut into units, and which of them stay on the device; costs.py: the bytes of a set of streamed units
table.py       every method x placement x wire for `keyhole plan`; recommend.py: which row to choose; page.py: the page
seconds.py     from FLOPs and bytes to seconds, by the rates of a machine
measure.py     the rates of this machine; kept_rates.py: kept from one call to the next; profiles.py: of other machines
changes.py     which changes would make a run fit; refusals.py: the messages when a budget is too small
dtype.py       which dtype a model is computed in
outside.py     the parts of a model outside of its blocks, for the start block
experts.py     how experts are moved, for the start block

The byte formulas are beside the code they describe: model/forward/memory.py, model/backward/memory.py, and memory.py
in the folder of a method. The memory of the machine is in machine/host.py.
"""
