"""AdaLOMO's update from a gradient.

matrix.py makes the normalised gradient of matrices, vector.py that of vectors, step.py moves the weights by it.
"""
