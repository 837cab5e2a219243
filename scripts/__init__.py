"""Programs that remake or check what is in this repository; run them from its root."""
