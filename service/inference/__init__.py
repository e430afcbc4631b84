"""Inference without HTTP: encoding and classification of texts, in batches.

The HTTP API and the Python API `vitrine` both use this package. Its rooms, each of which imports
only those before it:

- `tokenizing`: texts to rows of token ids.
- `batching`: rows to batches, on the streams of a device. It knows no model and no text.
- `results`: loaded models, and what rows become.
- `explain`: explanations of scores, by exact terms and by deletion.
- `model`: the Python API of a model.
- `registry`: several models by name.

`errors` has the errors of all, and `call_options` the options that go with a call from its caller
to the queue.
"""
