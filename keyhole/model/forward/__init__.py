"""Forward passes of the unmodified module over weights that come and go: one pass, or several in lockstep."""
