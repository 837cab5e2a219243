"""LSP's subspaces: sparse projectors (projector.py), compressing both sides of a gradient with them (compress.py), and
decompressing the optimizer's step into a weight (decompress.py; blocks.py: in one stage, for projectors of blocks).
"""
