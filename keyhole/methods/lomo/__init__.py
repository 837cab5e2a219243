"""LOMO, AdaLOMO and LOMO + LoRA: the update happens inside the reverse sweep.

method.py     LOMO: one step                  sink.py       the update from one gradient
adalomo.py    a step size for every weight    table.py      its update of an embedding or head in chunks
lomo_lora.py  adapters beside LOMO            loss_scale.py for float16
traits.py     settings and rows
"""
