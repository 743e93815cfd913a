"""Units, and what GPUs hold beside tensors."""

BF16, FP32 = 2, 4
GIB = 2**30
OVERHEAD_BYTES = 6 * GIB
"""What a learner's process takes beside its tensors: CUDA's context, its kernels, NCCL's buffers. 5.8 GiB were measured
on each of four GPUs (docs/evidence/full_size.md)."""
ASLEEP_BYTES = 4 * GIB
"""What the driver and a sleeping engine take: context, CUDA graphs, the kernels' buffers. There it was 3.9 GiB."""
