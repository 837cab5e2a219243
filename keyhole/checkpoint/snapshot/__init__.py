"""Checkpoints that are written in the background during training.

background.py     which memory is saved, how changes are announced, and the thread that writes
snapshot.py       the weights of one step, written while later steps change them (copy on write)
source.py         memory that is saved, and its places in the files
page_writer.py    writes flat memory into a file: in pieces, checked to be finite, with checksums
copy_threads.py   copies host memory with several threads
"""
