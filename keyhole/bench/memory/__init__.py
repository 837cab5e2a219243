"""`keyhole bench memory`: the memory of a training step at its peak, by part."""
