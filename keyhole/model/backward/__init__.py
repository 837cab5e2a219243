"""Gradients block by block, handed to a sink that keeps none.

reverse.py            the order of a step: forward, head, blocks in reverse, embedding, spine
sink.py               what a method does with gradients
vocabulary.py         loss, and gradients of embedding and head, in chunks of the vocabulary
tape.py               what the forward leaves behind so that blocks can be differentiated one at a time
activation_store.py   block inputs in host memory meanwhile
recompute.py          the second run of a block, whose linear layers offer their gradients factor by factor
experts.py            gradients of experts that come one at a time
kept_blocks.py        blocks that keep all their activations, as many as fit
recorded.py           small blocks as CUDA graphs; recorded_visits.py: which of them
unit_gradients.py     where their gradients are meanwhile
compiled.py, compiled_linear.py    the same for blocks that run through torch.compile
memory.py             the bytes of all this
"""
