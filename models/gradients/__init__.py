"""Gradients of the reference model, which has the same weights as the served graph.

- `inputs`, `results`: dataclasses and option names of all methods. They do not import torch.
- `budget`: cost of each method. It does not import torch.
- `reference_model`: the PyTorch model of an artifact; hidden states can be replaced between layers.
- `integration`: path integrals with adaptive refinement.
- `attribution`: attribution of a scalar to the tokens of a text.
- `faithfulness`: effect of removing parts of a text, beside their scores.
- `activations`: outputs of the steps of the forward pass, and their replacement by those of others.
- `pair`: attribution of a cosine or a dot product to pairs of tokens.
- `flow`: statistics of activations and gradients at every step of a training step. `flow_tap`
  records the steps, and `objectives` has the training objectives.
- `layer_norm_trace`: values and errors of add + norm, step by step.
- `layer_norm_check`: verdicts on implementations of add + norm. It uses
  `layer_norm_implementations`, `layer_norm_operands` and `layer_norm_bounds`.
- `parity`: comparison of the served model with the reference model. `graph_weights` compares their
  weights.
"""
