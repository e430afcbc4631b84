"""The encoder as PyTorch modules: norms, attention, layers, pooling and heads."""
