"""How many benchmark problems models solve, as they are served: quantized where they are quantized."""
