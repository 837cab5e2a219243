"""Baselines, for resident models only.

first_order.py  AdamW and SGD, torch's own     galore.py   GaLore
memory.py       bytes and work                 traits.py   settings and rows
"""
