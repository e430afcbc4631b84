"""Gradients of the PyTorch twin: the same weights as the served graph, the same op.

- `twin`: an artifact's model, opened at the points where its tokens can be looked at.
- `integration`: path integrals that refine themselves until they add up.
- `attribution`: which tokens made a number that is computed from a text's vector.
- `pair`: which tokens of two texts made their similarity, token by token.
- `budget`: what those two can be told and what they cost; torch-free.
- `flow`: where the gradient of a training objective shrinks, grows or breaks, in the passes of
  `flow_passes`; `objectives`: what it can be the gradient of.
- `layer_norm_trace`: the op step by step; `layer_norm_check`: whether the implementations of
  `layer_norm_implementations` are right.
- `parity`: whether the served graph is still the model that gradients are taken of.
"""
