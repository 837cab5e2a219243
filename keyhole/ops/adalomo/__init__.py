"""AdaLOMO's update from a gradient.

matrix.py computes the normalised gradient of matrices, vector.py that of vectors, step.py updates the weights with it.
"""
