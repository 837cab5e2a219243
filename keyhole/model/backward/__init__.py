"""Gradients block by block, handed to a sink that keeps none."""
