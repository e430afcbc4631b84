"""The service, from text over HTTP to vectors. It knows text, never weights, and never torch.

A request's path: `routes.encode` -> `tokenizer` -> `batching.submit` -> `models.engines` ->
`vectors`, which makes the response's bytes. `runtime` holds what one process serves with, and
`app` wires all of it together.
"""
