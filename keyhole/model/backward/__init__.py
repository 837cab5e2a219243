"""The backward pass block by block; each gradient is handed to a sink, and none is kept.

reverse.py            the order of a step: forward, head, blocks in reverse, embedding, common; what is refused
sink.py               the interface through which a method receives gradients, and how they get there
vocabulary.py         loss, and gradients of embedding and head, in chunks of the vocabulary
tape.py               what the forward pass keeps so that blocks can be differentiated one at a time
block_call.py         one call of a block, plain or compiled, as a function of its inputs; the autograd graph of one run
activation_store.py   what a step keeps in host memory: block inputs, and what passes that wait hold
kept_blocks.py        blocks that keep all their activations, as many as fit
recompute.py          recomputation of a block, whose linear layers offer their gradients as factors
experts.py            gradients of experts that are loaded one at a time
recorded.py           small blocks as CUDA graphs (model/recorder.py)
attention.py          attention whose backward pass gives the same bits every time
refusals.py           what cannot be differentiated, and why
memory.py             the device bytes of the backward pass
"""
