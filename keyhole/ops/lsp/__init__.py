"""LSP's sparse projectors: what they are, compressing activations with them, decompressing a step into a weight."""
