"""`keyhole bench layers`: forward, backward and update of one block, on the CPU and on the GPU."""
