"""`keyhole bench snapshots`: background checkpoints during training."""
