"""The license of a checkpoint, as its model card or its config states it."""

from collections.abc import Callable

from huggingface_hub import metadata_load

from models.export.model_folder import ModelFolder
from models.printable import printable, reason_of

MODEL_CARD = "README.md"
_CONFIG = "config.json"
# Characters of the name of a license; a license is not its text.
_LONGEST = 128


def license_of(files: ModelFolder, report: Callable[[str], None]) -> str | None:
    """Return the license in the metadata of the model card, or else in config.json.

    Names are the hub's, such as "apache-2.0". Several are separated by commas. For "other", it is
    the field `license_name`, if there is one. A model card with invalid metadata is reported, and
    states none: the model itself does not depend on it. Neither do other values than names.

    Raises:
        CheckpointError: config.json is invalid.
    """
    stated = _license_in(_metadata(files, report))
    if stated is None and files.has(_CONFIG):
        stated = _license_in(files.json(_CONFIG, dict))
    return stated


def _metadata(files: ModelFolder, report: Callable[[str], None]) -> dict[str, object]:
    if not files.has(MODEL_CARD):
        return {}
    try:
        return metadata_load(files.locate(MODEL_CARD)) or {}
    except Exception as error:  # noqa: BLE001 - PyYAML documents few of its errors
        report(f"The metadata of {MODEL_CARD}, with the license, is invalid: {reason_of(error)}")
        return {}


def _license_in(metadata: dict[str, object]) -> str | None:
    stated = metadata.get("license")
    if stated == "other":
        stated = metadata.get("license_name") or stated
    names = stated if isinstance(stated, list) else [stated]
    if not names or not all(isinstance(name, str) and 0 < len(name) <= _LONGEST for name in names):
        return None
    return ", ".join(map(printable, names))
