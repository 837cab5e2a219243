"""What a run needs and what the machine has: bytes on both sides of the link, and where every unit lives.

    machine/host.py       host memory and cores that this process can have
    model/forward/memory.py     device bytes of a zeroth-order step      model/backward/memory.py   of a step that differentiates block by block
    methods/lsp/memory.py        of lsp, and where its moments go         methods/adam_offload/memory.py     host bytes of adam-offload
    placement.py  which units stay on the device           machine/probe.py      the machine, for `keyhole env`
    refusals.py   what too small a budget is told
"""
