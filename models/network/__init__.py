"""The encoder as PyTorch modules: embeddings, norms, attention, layers, pooling, heads."""
