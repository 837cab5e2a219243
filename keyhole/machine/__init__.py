"""What this computer has (host.py, probe.py), and how things are written: sizes (sizes.py), printed text (text.py)."""
