"""Files that survive a crash. Knows nothing of models or training.

files.py          durable writes: temporary names, flushes, renames; links are not followed
append.py         records appended to a file, kept in memory while the disk is full
crc.py            the checksum of a file from the checksums of its pieces
tensors.py        safetensors files, tensor by tensor
weight_files.py   the weight files of a model directory, safetensors or .bin
read_json.py      a small JSON file that somebody else wrote
weights_hash.py   which weights a model directory holds
"""
