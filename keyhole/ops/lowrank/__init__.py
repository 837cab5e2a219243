"""Matrices of low rank beside a weight: x (A V^T)^T without ever making A V^T (product.py), and W + A V^T (fold.py)."""
