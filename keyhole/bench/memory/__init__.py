"""`keyhole bench memory`: what a training step holds, by part, at its peak."""
