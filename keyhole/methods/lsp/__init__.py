"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

method.py               the method: one step
target.py               the trained tensors, their projectors and places
learn.py, fit.py        when and how projectors are learned
sink.py                 the sink of the reverse sweep: sums compressed gradients in buffers
update.py               from complete gradients to updated weights
adam.py                 Adam on the GPU, and on the CPU
memory.py               bytes, and where moments live
traits.py               settings and row
"""
