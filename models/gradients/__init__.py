"""Gradients of the PyTorch model: the same weights as the served graph, the same operator.

- `inputs`, `results`: dataclasses and names of all methods; torch-free.
- `budget`: cost of the methods; torch-free.
- `reference_model`: the model of an artifact, opened at the layers where tokens can be replaced.
- `integration`: path integrals with adaptive refinement.
- `attribution`: attribution of a number to the tokens of a text.
- `pair`: attribution of a similarity to pairs of tokens.
- `flow`: sizes of activations and gradients at every step, recorded by `flow_tap`; `objectives`:
  the training objectives.
- `layer_norm_trace`: the fused operator step by step; `layer_norm_check`: verdicts on the
  `layer_norm_implementations`.
- `parity`: comparison of the served graph with the reference model.
"""
