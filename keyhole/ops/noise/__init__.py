"""Random numbers without state: the z of an element is a pure function of (seed, step, direction, index).

words.py makes random words from counters, and defines the index of an element and how kernels map to indices;
gaussian.py makes normals from words, tiles.py defines which words belong to which element.
"""
