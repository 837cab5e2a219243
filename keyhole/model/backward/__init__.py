"""The backward pass block by block; each gradient is handed to a sink, and none is kept.

reverse.py            the order of a step: forward, head, blocks in reverse, embedding, spine
hand_over.py          gradients of the current block on their way from autograd to the sink
sink.py               the interface through which a method receives gradients
vocabulary.py         loss, and gradients of embedding and head, in chunks of the vocabulary
tape.py               what the forward pass keeps so that blocks can be differentiated one at a time
block_graph.py        the autograd graph of one run of one block
shared_objects.py     objects that a model passes to all of its blocks
activation_store.py   block inputs in host memory between forward and backward pass
recompute.py          recomputation of a block, whose linear layers offer their gradients as factors
experts.py            gradients of experts that are loaded one at a time
kept_blocks.py        blocks that keep all their activations, as many as fit
recorded.py           small blocks as CUDA graphs (model/recorder.py)
unit_gradients.py     the buffer for the gradients of such blocks
compiled.py, compiled_linear.py    recomputation and backward pass of blocks that run through torch.compile
attention.py                       attention whose backward pass gives the same bits every time
refusals.py           models and losses that cannot be differentiated
memory.py             the device bytes of the backward pass
"""
