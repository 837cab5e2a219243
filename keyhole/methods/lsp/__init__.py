"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

method.py               the method: one step
setup.py                which tensors are projected, and where moments live
target.py               one trained tensor and its projectors
learn.py, fit.py        when and how projectors are learned
sink.py                 the sink of the reverse sweep: sums compressed gradients
update.py               from complete gradients to updated weights
gradient_buffers.py     buffers in which gradients are accumulated
adam.py                 Adam on the GPU
host.py, schedule.py    Adam on the CPU, and the order of its updates
shards.py               on several ranks
step.py, timing.py      data shared by the units of a step; where its time goes
memory.py               bytes
traits.py               settings and row
"""
