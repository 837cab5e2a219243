"""What the others are compared with: AdamW and SGD (torch), LoRA (peft), GaLore."""
