"""Weights at home: where each parameter is stored and in which format.

homes.py     parameters as views of flat memory       format.py    formats at home and on the link
frozen.py    a frozen unit in 8 or 4 bits             published.py models published in 8 or 4 bits: their format at home
read.py      from files                               random.py    initialised from a seed
save.py      to files; save_parts.py: by several ranks; saved_files.py: which files these are
finite.py    checked before they are written

Weight files that do not fit the model: twice.py (a tied tensor under both names), unused.py (tensors without a
parameter), gguf_config.py (a GGUF file beside another config.json).
"""
