"""Exact AdamW whose fp32 state lives in host memory.

method.py     the method: one step            state.py      master weights and moments, updated unit by unit
exchange.py   gradients D2H, weights back     jobs.py       updates as jobs for the CPU or the GPU
shards.py     on several ranks                fingerprint.py   whether weights have changed, from a few sums
gpu_updates.py, lane.py   updates on the GPU               memory.py, traits.py   bytes; settings and row
"""
