"""Weights at home: where each parameter is stored and in which format.

homes.py     parameters as views of flat memory       format.py    formats at home and on the link
fit.py       what files must be to be read            read.py      from files, or initialised from a seed
save.py      to files, by one process or several      small_files.py    config, tokenizer and all others beside them
"""
