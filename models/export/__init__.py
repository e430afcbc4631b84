"""Export: from a checkpoint to an artifact. The only part of `models` that handles text.

Read in this order:

- `sources`: finds the model: a local folder, an installed package or a hub id.
- `model_folder`, `families`, `checkpoint`: load the model's files into PyTorch modules.
- `sentence_config`: reads pooling, prompts and other settings of sentence-transformers.
- `tokenizer_file`: prepares the tokenizer for serving.
- `onnx_graph`: exports the modules to an ONNX graph.
- `exporter`, `parity`: write the artifact, and compare its graphs with PyTorch.
- `__main__`: the command line, `vitrine-export`.
"""
