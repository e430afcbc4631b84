"""The encoder, from checkpoint to vectors. It knows token ids, never text.

Read in this order:

- `add_layer_norm`: the fused op under every sublayer.
- `encoder`: the Transformer encoder, dense and packed.
- `pooling`, `sentence_encoder`: from token vectors to one vector per row.
- `model_folder`, `recipe`, `families`, `checkpoint`: Hugging Face and sentence-transformers files
  into those modules.
- `sources`, `tokenizer_file`, `onnx_graph`, `export`: a model into an artifact, a directory with an
  ONNX graph. Here alone text is met: the tokenizer's file is made ready, and the self-check's
  inputs are tokenised once.
- `artifact`, `packing`, `engines`: all that a service needs to run it. These three are torch-free.

Shapes are written with one legend throughout:

    T  tokens of a batch, all rows end to end       H  attention heads
    B  rows (texts) of a batch                      K  width of a head, D / H
    L  length of the longest row, padding included  F  width of the feed-forward layer
    D  width of a token vector                      V  size of the vocabulary
"""

import os
import sys

# onnxruntime and OpenVINO call their makers as soon as they are imported, unless told before.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
