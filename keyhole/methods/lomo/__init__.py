"""LOMO, AdaLOMO and LOMO + LoRA: the update inside the reverse sweep."""
