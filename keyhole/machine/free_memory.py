"""Gives back the memory of what is no longer referenced."""

import gc

import torch


def free_memory() -> None:
    """Of a model that was closed, say. cuBLAS keeps a workspace for every stream on which a CUDA graph was captured; it
    would count as memory of whatever comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
