"""Low-rank factors beside a weight.

product.py    x (A V^T)^T without computing A V^T      fold.py    W + A V^T
"""
