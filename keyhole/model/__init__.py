"""A Hugging Face decoder whose weights live in flat memory.

structure/   what is known of a decoder before its weights are read: blocks, flat layout, module, tokenizer
weights/     where weights are stored and in which format; reading, initialising and saving them
forward/     forward passes of the unmodified module while units are streamed
backward/    the backward pass block by block; each gradient is handed to a sink
model.py     Model, which ties these together
batch.py     a batch on its way to the device
objective.py     the loss of a batch: over tokens, or over candidates
classification.py   models that classify a text
attached.py  the methods that train a model: the interface to them, and updates that they have deferred
by_hand.py   what a caller changes in the module between steps
rank_duties.py   what one of several ranks does for a model
recorder.py      CUDA graphs: key, room, capture, verify, replay
spare_memory.py  device memory for what makes steps faster and need not be, such as CUDA graphs

Rows that are computed together:

row_rules.py     which rows of a model may be
packing.py   samples packed into one row: how a model is told
best_fit.py  which samples go into which row
apart.py     tests that packed samples do not attend to each other
shared_rows.py   candidates that differ in their last token share a row
joined_rows.py   short rows of candidates are put behind each other in one row
causality.py     tests that a position depends on the tokens before it alone, without which no rows are shared or joined
"""
