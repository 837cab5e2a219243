"""`keyhole bench lsp-bias`: how much of a model's gradients projectors lose, on your own data."""
