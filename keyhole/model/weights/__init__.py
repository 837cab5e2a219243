"""Weights at home: where each parameter is stored and in which format.

homes.py     parameters as views of flat memory
format.py    formats at home and on the link
read.py      from files        random.py    initialised from a seed
save.py      to files          finite.py    checked before they are written
"""
