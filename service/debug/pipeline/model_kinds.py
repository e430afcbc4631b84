"""Kinds of models, and the gradient routes that each kind has."""

from collections.abc import Mapping
from typing import Literal, get_args

from models.artifact import Manifest
from service.inference.errors import InvalidInput
from service.inference.explanations import DISTANCES

ModelKind = Literal["embedding", "reranker", "classifier", "sparse", "multi"]

# Names of the kinds in messages. A reranker has one label, and a classifier several.
KIND_NAMES: Mapping[ModelKind, str] = {
    "embedding": "embedding models",
    "reranker": "rerankers",
    "classifier": "classifiers",
    "sparse": "sparse encoders",
    "multi": "multi-vector models",
}
_ALL: tuple[ModelKind, ...] = get_args(ModelKind)
ROUTES: Mapping[str, tuple[ModelKind, ...]] = {
    "attribute": _ALL,
    "attribute/pair": ("embedding",),
    "flow": ("embedding",),
    "layernorm": _ALL,
    "parity": ("embedding",),
    "vjp": ("embedding",),
    "activations": _ALL,
    "patch": _ALL,
    "capabilities": _ALL,
}
# Kinds that read a pair of texts at once.
READS_PAIRS: tuple[ModelKind, ...] = ("reranker", "classifier")
# Kinds with targets of a pair of texts. Multi-vector models encode each text on its own.
TAKES_PAIRS: tuple[ModelKind, ...] = (*READS_PAIRS, "multi")


def kind_of(manifest: Manifest) -> ModelKind | None:
    """Return the kind of a model; None if its outputs have no gradient routes."""
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


def kind_for(route: str, manifest: Manifest) -> ModelKind:
    """Return the kind of a model, which must be one that the route is for.

    Args:
        route: Key of `ROUTES`.
        manifest: Manifest of the model.

    Raises:
        InvalidInput: The route is for other kinds of models.
    """
    kind = kind_of(manifest)
    if kind is None or kind not in ROUTES[route]:
        *others, last = (KIND_NAMES[allowed] for allowed in ROUTES[route])
        names = f"{', '.join(others)} and {last}" if others else last
        raise InvalidInput(
            f"/debug/{route} is for {names}; the model {manifest.name} is of another kind",
            code="wrong_model",
        )
    if route not in routes_of(kind, manifest):
        raise InvalidInput(
            f"/debug/{route} is for cosines and dot products, which are sums over pairs of tokens; "
            f"the similarity of the model {manifest.name} is {manifest.similarity}",
            code="wrong_model",
        )
    return kind


def routes_of(kind: ModelKind, manifest: Manifest) -> list[str]:
    """Return the gradient routes of a model, keys of `ROUTES`."""
    is_sum = manifest.similarity not in DISTANCES
    return [
        route
        for route, kinds in ROUTES.items()
        if kind in kinds and (is_sum or route != "attribute/pair")
    ]
