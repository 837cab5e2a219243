"""A Hugging Face decoder whose weights live in flat memory.

structure/   what is known of a decoder before its weights are read: blocks, flat layout, module, tokenizer
weights/     where weights are stored and in which format; reading, initialising and saving them
forward/     forward passes of the unmodified module while units are streamed
backward/    the backward pass block by block; each gradient is handed to a sink
model.py     Model, which ties these together
batch.py     a batch on its way to the device
objective.py     the table of losses: over tokens, over candidates
classification.py   models that classify a text
attached.py  the methods that train a model: what they have deferred, and what a caller changes by hand
recorder.py      CUDA graphs: key, room, capture, verify, replay
spare_memory.py  device memory for what makes steps faster and need not be, such as CUDA graphs
rows.py      rows that are computed together: shared, joined or packed
row_rules.py     which of it a model allows, tested on the model itself
"""
