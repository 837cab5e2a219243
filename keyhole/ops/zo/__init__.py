"""Zeroth-order steps: update weights along random directions, and perturb them.

element.py has the arithmetic and the settings (ZOStep); the other files apply it to a flat tensor (flat.py), to
weights packed in 8 bits (packed.py) and to rows of an embedding table (rows.py).
"""
