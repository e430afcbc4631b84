"""Gradients of the PyTorch twin: the same weights as the served graph, the same op.

- `twin`: an artifact's model, opened at the points where its tokens can be looked at.
- `integration`: path integrals that refine themselves until they add up.
- `attribution`: which tokens made a number that is computed from a text's vector.
- `pair`: which tokens of two texts made their similarity, token by token.
"""
