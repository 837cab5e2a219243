"""Low-rank factors beside a weight: x (A V^T)^T without computing A V^T (product.py), and W + A V^T (fold.py)."""
