"""Memory that does not fit the device: exact-size host memory, device slots, the engine that moves pages, host workers.

engine.py     prefetches pages, writes changed pages back               slots.py      device buffers for pages
arena.py      host memory of exact size, page-locked                    protocols.py  other readers and writers of homes
workers.py    host jobs in threads beside the launching thread          downlink.py   D2H copies
stalls.py     how long the GPU waited                                   timeline.py   a trace of copies and kernels
shards.py     pages that are sharded over ranks                         gather.py     pages that ranks upload jointly
lending.py    memory of one stream that other streams use

This package knows nothing about training: a page is flat memory with an index.
"""
