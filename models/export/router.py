"""Routers of sentence-transformers, whose queries pass through other modules than documents.

Supported are those of inference-free sparse models: a query has static weights of its tokens.
Source: Geng et al. 2024, arXiv:2411.04403.
"""

from dataclasses import dataclass

from models.export.model_folder import (
    CheckpointError,
    ModelFolder,
    check_defaults,
    check_known,
    join,
)

_CLASS = "Router"
_CONFIG = "router_config.json"
_ROUTES = ("query", "document")
_QUERY_MODULE = "SparseStaticEmbedding"


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Modules of queries and of documents.

    Attributes:
        query: Subfolder of the module with the weights of queries.
        document: Type and path of each module of documents, as in modules.json.
        default: Route of texts that are neither queries nor documents, "query" or "document".
    """

    query: str
    document: tuple[tuple[str, str], ...]
    default: str


def read_routes(folder: ModelFolder) -> Routes | None:
    """Return the routes of a model folder; None if modules.json does not start with a Router.

    Raises:
        CheckpointError: Modules follow the Router, or its config is invalid or unsupported.
    """
    router, *others = folder.json("modules.json", list, []) or [None]
    if not isinstance(router, dict) or class_name(router.get("type")) != _CLASS:
        return None
    if others:
        raise CheckpointError("modules.json lists modules after the Router, which is not supported")
    subfolder = str(router.get("path") or "")
    name = join(subfolder, _CONFIG)
    config = folder.json(name, dict)
    types, structure, parameters = (
        _objects(config, field, name) for field in ("types", "structure", "parameters")
    )
    if sorted(structure) != sorted(_ROUTES):
        raise CheckpointError(
            f"{name} has the routes {', '.join(structure)}; only query and document are supported"
        )
    query, document = (
        tuple((str(types.get(key)), join(subfolder, key)) for key in _keys(structure, route, name))
        for route in _ROUTES
    )
    if [class_name(kind) for kind, _ in query] != [_QUERY_MODULE]:
        kinds = " -> ".join(class_name(kind) for kind, _ in query)
        raise CheckpointError(
            f"{name}: the route query is {kinds}; only {_QUERY_MODULE} is supported, as in "
            "inference-free sparse models"
        )
    check_known(parameters, ("default_route", "allow_empty_key", "route_mappings"), name)
    check_defaults(parameters, {"route_mappings": {}}, name)
    default = parameters.get("default_route")
    if default is None and parameters.get("allow_empty_key", True):
        default = next(iter(structure))
    if default not in _ROUTES:
        raise CheckpointError(f"{name}: default_route is {default!r}; it must be query or document")
    return Routes(query=query[0][1], document=document, default=str(default))


def class_name(path: object) -> str:
    """Return the class name in a module's type; the whole type of code from elsewhere."""
    package, _, name = str(path).rpartition(".")
    return name if package.split(".")[0] == "sentence_transformers" else str(path)


def _objects(config: dict[str, object], field: str, name: str) -> dict[str, object]:
    value = config.get(field, {})
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: {field} must be a JSON object")
    return value


def _keys(structure: dict[str, object], route: str, name: str) -> list[str]:
    keys = structure[route]
    if not isinstance(keys, list):
        raise CheckpointError(f"{name}: the route {route} must be a list of modules")
    return list(map(str, keys))
