"""What a run needs and what the machine has: bytes on both sides of the link, and where every unit lives.

    host.py       host memory and cores that this process can have
    memory.py     device bytes of a zeroth-order step      gradient.py   of a step that differentiates block by block
    lsp.py        of lsp, and where its moments go         states.py     host bytes of adam-offload
    placement.py  which units stay on the device           probe.py      the machine, for `keyhole env`
    refusals.py   what too small a budget is told
"""
