"""Models, from checkpoint to vectors: export, execution and gradients.

All parts work on token ids, except that `export` also handles text: it prepares the tokenizer and
tokenises the inputs of the self-check. Read in this order:

- `add_layer_norm`: the fused residual addition and norm of every sublayer.
- `network`: the encoder as PyTorch modules, for dense and packed batches.
- `export`: conversion of a checkpoint to an artifact.
- `artifact`, `identity`, `packing`, `engines`, `quantization`: loading, naming and running an
  artifact, and bytes and bits in place of float32. Torch-free.
- `gradients`: attribution, gradient flow and parity, computed with the PyTorch model.

Legend of all shapes:

    T  tokens of a batch, rows concatenated         H  attention heads
    B  rows (texts) of a batch                      K  width of a head, D / H
    L  length of rows after padding to the longest  F  width of the feed-forward layer
    D  width of a token vector                      V  size of the vocabulary
    W  width of a row vector                        C  labels of a classifier, one logit each
"""
