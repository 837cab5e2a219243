"""`keyhole bench lomo | lsp`: first-order methods beside torch's own optimizers."""
