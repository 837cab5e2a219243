"""Memory that does not fit the device: host memory to the byte, slots, the engine that moves pages, host workers.

Nothing here knows about learning: a page is flat memory with an index.
"""
