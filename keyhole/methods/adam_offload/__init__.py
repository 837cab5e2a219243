"""Exact AdamW whose fp32 state lives in host memory.

method.py     the method: one step            updates.py           master weights and moments, updated unit by unit
exchange.py   gradients D2H, weights back     memory.py, traits.py   bytes; settings and row
"""
