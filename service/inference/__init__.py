"""Inference without HTTP: text to vectors, in batches. The HTTP API and scripts share these calls.

Read in this order:

- `model`: `open_model` and `Model.encode`, the public calls; `sync_model` for synchronous code.
- `tokenizer`: converts texts to rows of token ids.
- `batcher`, `batch_former`: group rows into batches and run the batches.
- `results`, `errors`, `metrics`, `executor`: parts that the modules above use.
"""
