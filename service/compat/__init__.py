"""Other servers' contracts over the same calls as `POST /encode`, so that their clients work here.

Each module has a `router`, and `error`, which says in that server's words what went wrong.
"""
