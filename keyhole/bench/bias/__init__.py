"""`keyhole bench lsp-bias`: how much of a model's gradients projectors lose, on data of one's own."""
