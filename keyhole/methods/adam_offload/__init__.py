"""Exact AdamW whose fp32 state lives in host memory."""
