"""Low-rank directions for zeroth-order steps: Z = U V^T / sqrt(r), U drawn every step, V kept for a period (LOZO).

From the bottom up; a file imports only from files above it:

    parts.py             which tensors of the blocks have factors, and where these are stored
    factors.py           the factors as numbers: drawn, perturbed, updated, set aside at the end of a period, saved
    guide.py             V from a pass over some rows, instead of random numbers
    layers.py            the layers of the model, which add the factors to what they compute; merged into the weights
    saved.py             a checkpoint as a model
    directions.py        the directions: one pass over the weights of a unit for all looks of a step
"""
