"""keyhole: full-parameter fine-tuning of language models that do not fit your GPU."""

__version__ = "0.1.0"
