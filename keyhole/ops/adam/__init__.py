"""AdamW on state in host memory: by the CPU (host), and by the GPU with the same bits (device)."""
