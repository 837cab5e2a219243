"""What is found in a Hugging Face decoder: its blocks, its flat layout, the module without weights, its tokenizer."""
