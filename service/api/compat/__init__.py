"""The APIs of other services, so that their clients work with this service.

The handlers call the methods of `service.inference.model.model.Model`, as the native API does. The
modules `openai`, `rerank`, `cohere`, `vllm` and `tei` each have a `router`, and a function
`render_error` that returns the response to an error in the format of the module's API.
"""
