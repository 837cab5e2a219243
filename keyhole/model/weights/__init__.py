"""Weights at home: where each parameter lies and in which format.

homes.py     parameters as views of flat memory
format.py    formats at home and on the link
read.py      from files        random.py    drawn from a seed
save.py      to files          finite.py    checked before they are written
"""
