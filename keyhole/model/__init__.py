"""A Hugging Face decoder whose weights live in flat memory.

structure/   what is found in a decoder: blocks, the flat layout, the module without weights, the tokenizer
weights/     where weights lie and in which format; reading, drawing and saving them
forward/     passes of the unmodified module over weights that come and go
backward/    gradients block by block, handed to a sink
batch.py     a batch on its way to the device
packing.py   samples that share a row do not see each other
attached.py  what a method brings to the model that it trains
model.py     Model, which ties these together
"""
