"""z as a pure function of (seed, step, direction, element): Philox counters, gaussian values, tiles of them for kernels."""
