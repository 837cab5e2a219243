"""APOLLO-Mini: LOMO with the step size of Adam for every matrix, from a rank-1 sketch of its gradient.

method.py   the update rule     memory.py   bytes and work     traits.py   settings and row
"""
