"""From a float32 result to the stored weight.

bits.py and bits2d.py draw the random bits of stochastic rounding (for flat tensors, for tiles of a matrix), round.py
rounds, pairs16.py handles 16-bit weights two at a time, store.py is the last step of every update that has a gradient.
"""
