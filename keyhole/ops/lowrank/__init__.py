"""Low-rank factors beside a weight.

product.py    x (A V^T)^T without computing A V^T      fold.py    W + A V^T
correct.py    what a product lacks, added by the kernel that reads its output next
relu.py       a ReLU that adds what the product before it lacks, and sketches for the layer after it
compress.py   a low-rank sum in fewer terms            norm.py    norms of several looks, each with its own weight
eigen.py, exact.py   eigenvectors and small products with the same bits on every device
"""
