"""Export: from a checkpoint to an artifact. The only part of `models` that handles text.

Read in this order:

- `sources`: from a folder, an installed package or a hub id to a local folder.
- `model_folder`, `families`, `checkpoint`: from its files to PyTorch modules.
- `sentence_config`: pooling, prompts and other settings of sentence-transformers.
- `tokenizer_file`: the tokenizer, prepared for serving.
- `onnx_graph`: from the modules to an ONNX graph.
- `exporter`, `parity`: the artifact, and its comparison with PyTorch.
- `__main__`: the command line, `vitrine-export`.
"""
