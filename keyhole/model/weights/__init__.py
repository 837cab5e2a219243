"""Weights at home: where each parameter lies, in which format, how it is read from files or drawn at random."""
