"""Aligned layers: low-bit forward on the tensors that are published, straight-through BF16 backward."""
