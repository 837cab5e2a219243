"""LoRA: a frozen model, and trained low-rank adapters beside its linear layers.

method.py       the step: forward and backward pass block by block, AdamW on the adapters
adapted_linear.py   a linear layer with an adapter, and its backward pass
peft_layers.py  adapters in peft's layout and format              saved_adapter.py   adapters beside a saved model
traits.py       settings and row                                  memory.py          bytes and work
"""
