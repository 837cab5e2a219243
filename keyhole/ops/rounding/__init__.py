"""fp32 results back to the stored dtype: the random bits of stochastic rounding, and the last step of every update."""
