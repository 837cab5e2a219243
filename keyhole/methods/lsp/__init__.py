"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

method.py               the method: one step
setup.py                which tensors are projected, and where moments live
target.py               one trained tensor and its projectors
learn.py, fit.py        when and how projectors are learned
sink.py                 the sink of the reverse sweep: sums compressed gradients in buffers
update.py               from complete gradients to updated weights
adam.py, host.py        Adam on the GPU; Adam on the CPU
shards.py               on several ranks
memory.py               bytes
traits.py               settings and row
"""
