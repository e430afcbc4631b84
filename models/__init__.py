"""Models: from checkpoint to vectors. They work on token ids, never on text.

Read in this order:

- `add_layer_norm`: the fused operator under every sublayer.
- `network`: the encoder as PyTorch modules, dense and packed.
- `export`: from a checkpoint to an artifact. The only part that handles text: it prepares the
  tokenizer and tokenises the inputs of the self-check.
- `artifact`, `packing`, `engines`: loading and running an artifact. Torch-free.
- `gradients`: attribution, gradient flow and parity, from the PyTorch model.

Legend of all shapes:

    T  tokens of a batch, rows concatenated         H  attention heads
    B  rows (texts) of a batch                      K  width of a head, D / H
    L  length of the longest row, with padding      F  width of the feed-forward layer
    D  width of a token vector                      V  size of the vocabulary
    W  width of a row vector
"""
