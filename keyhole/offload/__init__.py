"""Memory that does not fit the device: exact-size host memory, device slots, the engine that moves pages, host workers.

engine.py     prefetches pages, writes changed pages back               slots.py      device buffers for pages
arena.py      host memory of exact size, page-locked                    downlink.py   D2H copies
workers.py    host jobs in threads beside the launching thread          stalls.py     the share of a sweep in waits
sharded.py    pages of which every rank has a part

This package knows nothing about training: a page is flat memory with an index.
"""
