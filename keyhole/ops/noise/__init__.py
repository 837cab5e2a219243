"""Random numbers without state: the z of an element is a pure function of (seed, step, direction, index).

philox.py makes random words from counters, gaussian.py makes normals from words, index.py defines the index of an
element and how kernels map to indices, tiles.py defines which words belong to which element.
"""
