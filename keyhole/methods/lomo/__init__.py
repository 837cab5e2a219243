"""LOMO, AdaLOMO and LOMO + LoRA: the update happens inside the backward pass.

method.py     LOMO: one step                            update.py    the update from one gradient, and what is added up
adalomo.py    a step size for every weight              lomo_lora.py adapters beside LOMO
memory.py     the cost of a step                        traits.py    settings and rows
adam_pages.py a rule for matrices and AdamW for the rest, with state in host memory: of muon and apollo-mini
"""
