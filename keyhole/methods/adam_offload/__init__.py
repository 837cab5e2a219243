"""Exact AdamW whose fp32 state lives in host memory.

method.py     the method: one step            state.py      master weights and moments, updated unit by unit
exchange.py   gradients D2H, weights back     updates.py    updates as jobs for the CPU or the GPU
shards.py     on several ranks                memory.py, traits.py   bytes; settings and row
"""
