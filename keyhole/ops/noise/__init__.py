"""Random numbers without state: the z of an element is a pure function of (seed, step, direction, index).

philox.py makes random words from counters, gaussian.py normals from words, index.py numbers all elements of a model
and lays kernels over them, tiles.py says which words are an element's.
"""
