"""LoRA: a frozen model, and trained low-rank adapters beside its linear layers.

method.py           the step: forward and backward pass block by block, AdamW on the adapters
adapted_linear.py   a linear layer with an adapter, and its backward pass
adapters.py         adapters in peft's layout and format, made, saved and loaded
traits.py           settings and row          memory.py     bytes and work
"""
