"""Exact AdamW whose fp32 state lives in host memory.

method.py     the method: one step            state.py      masters and moments, updated unit by unit
exchange.py   gradients out, weights back     jobs.py       updates as jobs for whoever is free
gpu_updates.py, lane.py   the GPU's part in them            memory.py, traits.py   bytes; settings and row
shards.py     on several ranks
"""
