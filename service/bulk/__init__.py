"""Bulk encoding: files in, files out, resumable; the command `vitrine-encode`.

The files in the order in which records pass them: `options`, `sources`, `readers`, `texts`,
`pipeline` with `encoder` and `kinds`, `parts`, `opening`, `journal`. `job` connects them.
"""
