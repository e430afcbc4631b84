"""The Python API of a model: encode, classify, score and tag texts."""
