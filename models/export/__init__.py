"""Export of a checkpoint to an artifact. The only part of `models` that handles text.

Read in this order:

- `sources`: finds the model: a local folder, an installed package or a hub id.
- `model_folder`, `families`, `model_files`, `lora`, `weights`, `classifier`, `checkpoint`: load the
  model's files into PyTorch modules.
- `tasks`, `sentence_config`: read pooling, prompts and other settings of sentence-transformers.
- `tokenizer_settings`, `transformers_tokenizer`, `tokenizer_file`: prepare the tokenizer for
  serving.
- `onnx_graph`, `attention_nodes`: export the modules to an ONNX graph for each engine.
- `exporter`, `parity`: write the artifact, and compare its graphs with PyTorch.
- `calibration`: the ranges of quantised vectors, and their quality.
- `__main__`: the command line, `vitrine-export`.
"""
