"""Units, and what GPUs hold beside tensors."""

BF16, FP32 = 2, 4
MIB, GIB = 2**20, 2**30
OVERHEAD_BYTES = 6 * GIB
"""What a learner's process takes beside its tensors: CUDA's context, its kernels, NCCL's buffers. 5.8 GiB were measured
on each of four GPUs (docs/evidence/full_size_memory.md)."""
ENGINE_BYTES = 5 * GIB
"""What an engine takes beside weights and cache while it runs: its context, CUDA graphs, its largest batch; there 4.5
to 4.7 GiB."""
EMBEDDED_ENGINE_BYTES = GIB
"""What vLLM in the learner's own process allocates beside weights and cache: CUDA graphs, its largest batch; 0.8 to 1
GiB beside attention's adapters (docs/evidence/lora.md)."""
EMBEDDED_PROCESS_BYTES = 2 * GIB
"""What that one process takes beside tensors, learner and engine together; there 1.5 and 1.8 GiB."""
ASLEEP_BYTES = 4 * GIB
"""What the driver and a sleeping engine take: context, CUDA graphs, the kernels' buffers; there 3.9 GiB."""
PROCESS_BYTES = 6.7 * GIB
"""A fitted constant: what a host holds for each GPU beside pinned memory, fitted with `HOST_BYTES` on hosts of one, two
and four GPUs that pin next to nothing, and held 13.6, 20.7 and 32.3 to 35.2 GiB (docs/evidence/full_size_memory.md)."""
HOST_BYTES = 6.9 * GIB
"""The same, once for a host."""
