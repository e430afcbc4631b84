"""`with_artifacts`: the settings of the service, with artifacts in place of the names of models."""

import functools
from pathlib import Path

from models.engines import Precision
from models.manifest import ArtifactError
from service.model_cache import artifact_of
from service.settings import Settings


def with_artifacts(settings: Settings, *, refresh: bool = False) -> Settings:
    """Return the settings with paths of artifacts in place of the names of models.

    Args:
        settings: Settings of the service.
        refresh: See `artifact_of`, also for the errors.

    Raises:
        ArtifactError: No model is named.
    """
    models, model, engine = settings.models, settings.model, settings.engine

    @functools.cache  # a model that is served twice is exported once
    def artifact(name: Path, precision: Precision) -> Path:
        may_export = models.verify is None
        return artifact_of(
            name, engine.name, precision, models.cache, refresh=refresh, may_export=may_export
        )

    if models.folder is not None:  # has artifacts only
        return settings
    if models.served:
        served = tuple(
            each.model_copy(
                update={"path": artifact(each.path, each.precision or engine.precision)}
            )
            for each in models.served
        )
        return settings.model_copy(update={"models": models.model_copy(update={"served": served})})
    if "path" not in model.model_fields_set and not model.path.exists():
        raise ArtifactError(
            f"no model is named, and {model.path} does not exist: run vitrine serve MODEL, or "
            "vitrine explain --model MODEL, where MODEL is a folder, an installed package or a hub "
            "id such as BAAI/bge-small-en-v1.5"
        )
    path = artifact(model.path, engine.precision)
    return settings.model_copy(update={"model": model.model_copy(update={"path": path})})
