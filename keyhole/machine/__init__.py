"""This machine and this process.

host.py           memory and cores of the host             probe.py      versions, GPUs, measured rate of the link
rates.py          how fast a machine is, in numbers        settings.py   settings of torch; the limit of GPU memory
out_of_memory.py  errors that mean: memory is used up      collector.py  code that garbage collection must not interrupt
gpu.py            captures of CUDA graphs; frees memory    progress.py   progress of long work
worker.py         a process with a limit of time and memory, for programs and files that are not ours
held.py           what is one for the process: changed for a while, counted, restored; one thread computes at a time
sizes.py, text.py   formats sizes and text for messages
"""
