"""The license of a checkpoint, as its model card or its config states it."""

from collections.abc import Callable

import yaml
from huggingface_hub import metadata_load

from models.export.model_folder import ModelFolder
from models.printable import reason_of

MODEL_CARD = "README.md"
_CONFIG = "config.json"


def license_of(files: ModelFolder, report: Callable[[str], None]) -> str | None:
    """Return the license in the metadata of the model card, or else in config.json.

    Names are the hub's, such as "apache-2.0". Several are separated by commas. For "other", it is
    the field `license_name`, if there is one. A model card with invalid metadata is reported, and
    states none: the model itself does not depend on it.

    Raises:
        CheckpointError: config.json is invalid.
    """
    stated = _stated(_metadata(files, report))
    if stated is None and files.has(_CONFIG):
        stated = _stated(files.json(_CONFIG, dict))
    return stated


def _metadata(files: ModelFolder, report: Callable[[str], None]) -> dict[str, object]:
    if not files.has(MODEL_CARD):
        return {}
    try:
        return metadata_load(files.locate(MODEL_CARD)) or {}
    except (ValueError, yaml.YAMLError) as error:
        report(f"The metadata of {MODEL_CARD}, with the license, is invalid: {reason_of(error)}")
        return {}


def _stated(metadata: dict[str, object]) -> str | None:
    stated = metadata.get("license")
    if stated == "other":
        stated = metadata.get("license_name") or stated
    if isinstance(stated, list):
        stated = ", ".join(map(str, stated))
    return str(stated) if stated else None
