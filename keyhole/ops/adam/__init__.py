"""AdamW on fp32 masters and moments: on host memory by torch's kernel (host.py), on the device with the same bits
(device.py)."""
