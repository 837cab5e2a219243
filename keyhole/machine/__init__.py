"""This machine (host.py, probe.py, rates.py), process settings (settings.py), and formatting (sizes.py, text.py)."""
