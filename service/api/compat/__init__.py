"""The APIs of OpenAI and text-embeddings-inference, so that their clients work with this service.

Their handlers make the same calls as `POST /encode`. The modules `openai` and `tei` each have a
`router`, and a `render_error` that renders errors in the format of that API.
"""
