"""Strict loading of a checkpoint's tensors into the network's modules.

A tensor that is missing, unexpected or of the wrong shape raises an error with its name.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from models.export.families import TensorPart
from models.export.model_folder import CheckpointError


def fill(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    names: Callable[[str], Sequence[TensorPart]] = lambda key: (TensorPart(key),),
    *,
    source: str = "the checkpoint",
    value: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    widths: Sequence[int] = (),
    ignored: Sequence[str] = (),
) -> list[str]:
    """Load checkpoint tensors into a module; return the names of the unused tensors.

    Args:
        module: Module to load the tensors into.
        tensors: Tensors of the checkpoint, by name.
        names: Returns the checkpoint tensors, or parts of them, for a key of the module's state
            dict. They are concatenated along the first axis.
        source: Origin of the tensors, for error messages.
        value: Returns the value of a key from the key and its concatenated tensors.
        widths: Widths of queries, keys and values, if each of them has its own checkpoint tensor.
        ignored: Regular expressions for the names of tensors that may remain unused.

    Raises:
        CheckpointError: A tensor is missing or unexpected, has the wrong shape or dtype, or values
            that are not finite.
    """
    used: set[str] = set()
    for key, parameter in module.state_dict().items():
        parts = names(key)
        is_split = "in_proj" in key and len(parts) > 1
        sizes = widths if is_split else [parameter.shape[0] // len(parts)] * len(parts)
        values: list[Tensor] = []
        for part, size in zip(parts, sizes, strict=True):
            name, shape = part.name, (size * part.count, *parameter.shape[1:])
            if name not in tensors:
                raise CheckpointError(f"{source} lacks the tensor {name} of shape {shape}")
            tensor = tensors[name]
            if tensor.shape != shape or not tensor.is_floating_point():
                raise CheckpointError(
                    f"{source}: {name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
                    f"the config requires shape {shape} and a floating-point dtype"
                )
            own = tensor.chunk(part.count)[part.index].float()
            if not own.is_meta and not torch.stack(torch.aminmax(own)).isfinite().all():
                raise CheckpointError(f"{source}: {name} has a NaN or an infinity")
            values.append(own)
            used.add(name)
        with torch.no_grad():
            parameter.copy_(value(key, torch.cat(values)))
    unused = sorted(tensors.keys() - used)
    extra = [n for n in unused if not any(re.fullmatch(pattern, n) for pattern in ignored)]
    if extra:
        raise CheckpointError(
            f"{source} has unexpected tensors ({len(extra)}): {', '.join(extra[:5])}"
        )
    return unused
