"""What this computer has: host memory and cores (host), versions, GPU and link (probe); sizes with their units (sizes)."""
