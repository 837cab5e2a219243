"""The embedded default: a model of our own, its corpus and task, and the demo that trains it."""
