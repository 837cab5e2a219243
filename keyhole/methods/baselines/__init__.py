"""What the others are compared with, resident only.

first_order.py  AdamW and SGD, torch's own     galore.py     GaLore
lora.py         LoRA, by peft                  saved_adapter.py   adapters that lie beside a saved model
traits.py       settings and rows
"""
