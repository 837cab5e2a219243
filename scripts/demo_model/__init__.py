"""The generator of the embedded model and task: world, corpus, task, and the program that trains on them (__main__)."""
