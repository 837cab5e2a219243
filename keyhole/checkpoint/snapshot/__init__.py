"""A checkpoint that is written while training goes on.

background.py     what is captured, how changes are announced, and the thread that writes
snapshot.py       the weights of one step, written while later steps change them (copy on write)
source.py         memory that goes into a checkpoint, and its places in the files
page_writer.py    flat memory into a file: in pieces, checked to be finite, summed up
copy_threads.py   copies of host memory, made by several threads
"""
