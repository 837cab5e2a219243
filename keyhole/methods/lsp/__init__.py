"""LSP-Offload: Adam in a learned sparse subspace of every matrix."""
