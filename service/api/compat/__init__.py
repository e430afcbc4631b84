"""Other servers' APIs over the same calls as `POST /encode`, so that their clients work here.

Each module has a `router`, and a `render_error` for errors in that server's format.
"""
