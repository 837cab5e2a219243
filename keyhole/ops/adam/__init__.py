"""AdamW on state in host memory: by the CPU with torch's kernel (host.py), by the GPU with the same bits (device.py)."""
