"""shardwise trains PyTorch models that do not fit on one GPU, on PyTorch's own FSDP2."""

__version__ = "0.1.0"
