"""What this computer has, and what is said about it: memory and cores, versions and GPU, sizes with units, printed text."""
