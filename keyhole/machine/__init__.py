"""What this computer has: host memory and cores (host), versions, GPU and link (probe), sizes and their units (sizes)."""
