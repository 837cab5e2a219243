"""Baselines, for resident models only.

first_order.py  AdamW and SGD, torch's own     galore.py   GaLore     traits.py   settings and rows
"""
