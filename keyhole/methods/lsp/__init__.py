"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

method.py               the method: one step
setup.py                which tensors go through projectors, and where moments live
target.py               what is trained, tensor by tensor
learn.py, fit.py        when and how projectors are learned
update.py               the sink of the reverse sweep: from gradients to moved weights
gradient_buffers.py     where gradients are added up
adam.py                 Adam on the GPU
host.py, schedule.py    Adam on the CPU, and in which order
shards.py               on several ranks
step.py, timing.py      what the units of a step share; where its time goes
memory.py               bytes
traits.py               settings and row
"""
