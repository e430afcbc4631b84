"""Hybrid models: an embedding, and from the same pass one weight or one vector per token.

BGE-M3 has both, as linear layers beside the checkpoint (Chen et al. 2024, arXiv:2402.03216).
gte-multilingual-base has weights alone, as a token classifier with one label in the checkpoint.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from models.export.model_files import ModelFiles
from models.export.model_folder import CheckpointError, ModelFolder, classes_of
from models.export.weights import fill
from models.manifest import Output
from models.network.heads import DenseHead, Head

# Weight file and activation of each head of BGE-M3, by output.
_FILES: Mapping[Output, tuple[str, str]] = {
    "weights": ("sparse_linear.safetensors", "ReLU"),
    "multi": ("colbert_linear.safetensors", "Identity"),
}
# Tensors of the head for weights in a checkpoint.
_PREFIX = "classifier."
CHECKPOINT_WEIGHT = f"{_PREFIX}weight"
# BGE-M3 has no vector for the first token, whose vector is the embedding.
FIRST_VECTOR = 1


def has_weights(files: ModelFiles) -> bool:
    """Return whether an embedding model has a head for the weights of tokens."""
    is_named = any(name in files.family.ignored_heads for name in classes_of(files.config))
    return is_named or files.folder.has(_FILES["weights"][0])


def read_outputs(folder: ModelFolder, *, sparse: bool) -> tuple[Output, ...]:
    """Return the outputs per token of an embedding model.

    Args:
        folder: Model folder.
        sparse: Whether the head for weights in the checkpoint is used.
    """
    own = {output for output, (file, _) in _FILES.items() if folder.has(file)}
    return tuple(output for output in _FILES if output in own | ({"weights"} if sparse else set()))


def left_out(folder: ModelFolder) -> str | None:
    """Return a message about pickled heads of BGE-M3, which are not loaded; None if there are none.

    The message has the command that converts them.
    """
    pickles = [
        pickle
        for file, _ in _FILES.values()
        if not folder.has(file) and folder.has(pickle := file.replace(".safetensors", ".pt"))
    ]
    if not pickles:
        return None
    return (
        f"{' and '.join(pickles)} are left out, because loading a pickle can run code. To export "
        "sparse vectors and multi-vectors as well, convert them in the model folder: python -c "
        "'import sys, torch; from safetensors.torch import save_file as save; "
        '[save(torch.load(f, weights_only=True), f[:-2] + "safetensors") for f in sys.argv[1:]]\' '
        f"{' '.join(pickles)}"
    )


def take_heads(
    folder: ModelFolder, outputs: tuple[Output, ...], tensors: dict[str, Tensor]
) -> dict[Output, list[Head]]:
    """Return the heads of the outputs per token, and remove their tensors from `tensors`.

    Args:
        folder: Model folder.
        outputs: Outputs of the model.
        tensors: Tensors of the checkpoint, by name.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    heads: dict[Output, list[Head]] = {}
    for output, (file, activation) in _FILES.items():
        if output not in outputs:
            continue
        if folder.has(file):
            source, own = file, folder.tensors("", file)
        else:
            names = [name for name in tensors if name.startswith(_PREFIX)]
            source = "the head for weights in the checkpoint"
            own = {name.removeprefix(_PREFIX): tensors.pop(name) for name in names}
        weight = own.get("weight", torch.empty(0))
        if weight.dim() != 2 or not weight.numel() or (output == "weights" and len(weight) != 1):
            rows = " with one row" if output == "weights" else ""
            raise CheckpointError(f"{source} lacks a matrix 'weight'{rows}")
        out_features, in_features = weight.shape
        head = DenseHead(in_features, out_features, bias=True, activation=activation)
        fill(head.linear, own, source=source)
        heads[output] = [head]
    return heads
