"""Random numbers without state: the z of an element is a pure function of (seed, step, direction, index).

philox.py makes random words from counters, gaussian.py makes normals from words, index.py defines the index of an
element and how kernels are laid over indices, tiles.py says which words belong to which element.
"""
