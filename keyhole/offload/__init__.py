"""Memory that does not fit the device: host memory to the byte, slots, the engine that moves pages, host workers.

engine.py     uploads pages ahead of the work, writes changed ones back   slots.py      the buffers for them
arena.py      host memory of exact size, page-locked                    protocols.py  who else uses homes
workers.py    jobs on the host beside the launching thread              downlink.py   copies to the host
stalls.py     how long the GPU waited                                   timeline.py   a trace of all of it
shards.py     pages of which each rank keeps a part                     gather.py     pages that ranks upload together

Nothing here knows about learning: a page is flat memory with an index.
"""
