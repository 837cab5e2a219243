"""LOMO, AdaLOMO and LOMO + LoRA: the update happens inside the reverse sweep.

method.py     LOMO: one step                  sink.py          the update from one gradient
squares.py    the norm of the whole gradient  loss_scale.py    for float16
adalomo.py    a step size for every weight    table.py         its update of an embedding or head in chunks
lomo_lora.py  adapters beside LOMO            matrix_parts.py  AdaLOMO's update of a matrix that is sharded
shards.py     on several ranks                memory.py        the cost of a step
traits.py     settings and rows
"""
