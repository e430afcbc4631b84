"""Inference without HTTP: text to vectors, in batches. HTTP, Ray and scripts use the same calls.

Read in this order:

- `model`: `open_model` and `Model.encode`, the public calls; `sync_model` for synchronous code.
- `tokenizer`: text to rows of token ids.
- `batcher`, `batch_former`: rows to batches, and batches to the engine.
- `results`, `errors`, `metrics`, `executor`.
"""
