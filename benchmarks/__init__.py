"""Our own benchmarks: run them from the root of the repository. Measurements and commands: README.md."""
