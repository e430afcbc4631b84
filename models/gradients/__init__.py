"""Gradients of the reference model, which has the same weights as the served graph.

- `inputs`, `results`: dataclasses and option names of all methods. They do not import torch.
- `budget`: cost of each method. It does not import torch.
- `reference_model`: the PyTorch model of an artifact; hidden states can be replaced between layers.
- `integration`: path integrals with adaptive refinement.
- `attribution`: attribution of a scalar to the tokens of a text.
- `pair`: attribution of a cosine similarity to pairs of tokens.
- `flow`: sizes of activations and gradients at every operation of a training step. `flow_tap`
  records them, and `objectives` has the training objectives.
- `layer_norm_trace`: add + norm step by step. `layer_norm_check`: verdicts on the
  implementations in `layer_norm_implementations` and on results of other implementations, for
  `layer_norm_operands` and within `layer_norm_bounds`.
- `parity`: comparison of the served model with the reference model, for its weights in
  `graph_weights`.
"""
