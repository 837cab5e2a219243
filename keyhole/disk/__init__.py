"""Files that survive a crash, and weight files in published formats. Nothing here depends on models or training.

files.py          durable writes: temporary names, flushes, renames; links are not followed; checksums; the user's cache
tensors.py        safetensors files, tensor by tensor
weight_files.py   the weight files of a model directory: safetensors, .bin or GGUF; a hash that identifies them
gguf.py           GGUF files
quantized.py      bitsandbytes, GPTQ and AWQ in safetensors
json_text.py      JSON that every program can read, small JSON files of unknown origin, result files (--json)
"""
