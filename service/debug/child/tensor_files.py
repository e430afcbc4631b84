"""Files of named arrays with metadata, in formats that cannot hold code: safetensors and npz."""

from collections.abc import Callable, Mapping
from io import BytesIO

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from service.debug.activations import TensorFormat

Arrays = Mapping[str, NDArray[np.float32]]

# Name of the metadata: a key of safetensors' metadata, or an array with one string.
METADATA = "metadata"


def _safetensors(arrays: Arrays, metadata: str) -> bytes:
    return safetensors.numpy.save(dict(arrays), {METADATA: metadata})


def _npz(arrays: Arrays, metadata: str) -> bytes:
    file = BytesIO()
    np.savez(file, allow_pickle=False, **{METADATA: np.array(metadata)}, **arrays)
    return file.getvalue()


WRITERS: dict[TensorFormat, Callable[[Arrays, str], bytes]] = {
    "safetensors": _safetensors,
    "npz": _npz,
}
