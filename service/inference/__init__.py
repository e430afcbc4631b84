"""Inference without HTTP: encoding and classification of texts, in batches.

The HTTP API and the Python API `vitrine` both use this package. Read its modules in this order:

- `model`: `open_model` and `Model`, the public API; `sync_model` for synchronous code.
- `tokenizer`, `pairs`, `text_parts`: convert texts and pairs of texts to rows of token ids.
- `chunking`, `sentences`, `chunked_texts`, `late_chunking`: divide long texts into chunks; with
  `chunk_embeddings` and `chunk_scores`, their vectors and scores.
- `registry`, `model_version`, `model_watch`: several models by name, and artifacts that change.
- `batcher`, `batch_former`: queue rows and group them into batches.
- `streams`, `runs`, `devices`: run the batches of all models of a device.
- `cached_batcher`, `cache`: reuse the results of equal rows.
- `quantization`: int8, uint8 and bits in place of float32.
- `results`, `scores`, `errors`, `metrics`, `executor`: helpers of the modules above.
"""
