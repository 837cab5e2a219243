"""Zeroth-order fine-tuning (MeZO's estimator), forward passes only.

method.py     the method: one step            update.py     the update, applied when a unit is next visited
write_back.py when a unit is written back     spans.py      parts of a unit that are updated alike
memory.py     bytes                           traits.py     settings and row
"""
