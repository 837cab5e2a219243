"""`keyhole bench snapshots`: checkpoints written while training goes on."""
