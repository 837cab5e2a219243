"""What is known of a Hugging Face decoder before its weights are read.

source.py      where its files are: a directory, or a hub id; its tokenizer
config_files.py     its config.json and generation_config.json, checked before Transformers uses them
skeleton.py    its module, without the weights
reach.py       which parameters a forward pass on tokens uses, found without weights; which are frozen
find.py        its blocks, stacks of experts that are computed one expert at a time, and common
block_counts.py   kernels, bytes and activations of one block, counted from its own code
layout.py      its parameters as one flat array, cut into units
"""
