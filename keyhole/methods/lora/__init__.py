"""LoRA: a frozen model, and low-rank matrices beside its linear layers that learn.

method.py       the step: block by block forward and in reverse, AdamW on the adapters
peft_layers.py  adapters as peft makes, names and stores them     saved_adapter.py   adapters beside a saved model
traits.py       settings and row                                  memory.py          bytes and work
"""
