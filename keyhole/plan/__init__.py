"""What a run needs and what the machine has: which units stay on the device, and how many bytes and seconds that takes.

placement.py   where a model lives: reads the budget, refuses what cannot fit, and says what was decided
fit.py         the cut into units, and which of them stay on the device
table.py       every method x placement x wire for `keyhole plan`
advice.py      which row to choose, and which changes would make a run fit
seconds.py     from FLOPs and bytes to seconds, by the rates of a machine; common machines by name
measure.py     the rates of this machine, kept from one call to the next
dtype.py       which dtype a model is computed in

The byte formulas are beside the code they describe: model/forward/memory.py, model/backward/memory.py, and memory.py
in the folder of a method. The memory of the machine is in machine/host.py.
"""
