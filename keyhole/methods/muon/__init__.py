"""Muon, streamed: a momentum in host memory for every matrix, orthogonalised on the GPU while the matrix is there.

method.py   the update rule     memory.py   bytes and work     traits.py   settings and row
"""
