"""Zeroth-order fine-tuning (MeZO's estimator), forward passes only."""
