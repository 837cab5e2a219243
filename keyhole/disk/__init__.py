"""Files that survive a crash: atomic writes (files), checksums (crc), safetensors tensor by tensor (tensors), and which
weights a model directory holds (weights_hash). Knows nothing of models or training."""
