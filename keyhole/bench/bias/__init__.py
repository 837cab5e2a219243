"""`keyhole bench lsp-bias` (run.py): how much of a model's gradients projectors lose, on your own data."""
