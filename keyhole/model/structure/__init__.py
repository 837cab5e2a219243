"""What is known of a Hugging Face decoder before its weights are read.

source.py      where its files are: a directory, or a hub id
config_file.py its config.json, checked before Transformers uses it
generation_file.py  its generation_config.json
skeleton.py    its module, without the weights
reach.py       which parameters a forward pass on tokens uses, found without weights
freeze.py      which parameters are not trained
added_loss.py  losses that its config adds to the cross-entropy of the tokens
find.py        its blocks, and layers of special kinds
experts.py     its stacks of experts that are computed one expert at a time
block_counts.py   kernels, bytes and activations of one block, counted from its own code
parts.py       what all layouts of it have in common
layout.py      its parameters as one flat array, cut into units
tokenizer.py   its tokenizer
"""
