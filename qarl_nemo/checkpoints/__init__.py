"""Checkpoint conversion: Hugging Face safetensors in, quantized vLLM checkpoints out."""
