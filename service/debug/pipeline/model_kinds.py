"""Kinds of models."""

from collections.abc import Collection, Mapping
from typing import Literal, get_args

from models.manifest import Manifest
from service.inference.errors import InvalidInput

ModelKind = Literal["embedding", "reranker", "classifier", "sparse", "multi"]

ALL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)
# Kinds that read a pair of texts at once.
READS_PAIRS: tuple[ModelKind, ...] = ("reranker", "classifier")
# Kinds with targets of a pair of texts. Multi-vector models encode each text on its own.
TAKES_PAIRS: tuple[ModelKind, ...] = (*READS_PAIRS, "multi")
# Names of the kinds in messages. A reranker has one label, and a classifier several.
KIND_NAMES: Mapping[ModelKind, str] = {
    "embedding": "embedding models",
    "reranker": "rerankers",
    "classifier": "classifiers",
    "sparse": "sparse encoders",
    "multi": "multi-vector models",
}


def kind_of(manifest: Manifest) -> ModelKind | None:
    """Return the kind of a model; None if its outputs have no gradient routes."""
    if manifest.is_static or manifest.pools_tokens:
        return None
    match manifest.outputs:
        case ("pooled", *_):
            return "embedding"
        case ("logits", *_):
            return "reranker" if len(manifest.labels) == 1 else "classifier"
        case ("sparse", *_):
            return "sparse"
        case ("multi", *_):
            return "multi"
    return None


def kind_for(path: str, kinds: Collection[ModelKind], manifest: Manifest) -> ModelKind:
    """Return the kind of a model, which must be one that a route is for.

    Args:
        path: Path of the route.
        kinds: Kinds of models that it is for.
        manifest: Manifest of the model.

    Raises:
        InvalidInput: The route is for other kinds of models, or the model is static or pools
            tokens.
    """
    if manifest.is_static:
        raise InvalidInput(
            f"the model {manifest.name} is static: it has no network, and so no gradients; "
            "explain of /score gives the exact share of each token",
            code="wrong_model",
        )
    if manifest.pools_tokens:
        raise InvalidInput(
            f"the model {manifest.name} pools the vectors of tokens, which has no gradients here",
            code="wrong_model",
        )
    kind = kind_of(manifest)
    if kind is None or kind not in kinds:
        *others, last = (KIND_NAMES[allowed] for allowed in kinds)
        names = f"{', '.join(others)} and {last}" if others else last
        raise InvalidInput(
            f"{path} is for {names}; the model {manifest.name} is of another kind",
            code="wrong_model",
        )
    return kind
