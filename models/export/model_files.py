"""The files of a model folder that describe its network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from models.export.families import Family
from models.export.model_folder import ModelFolder


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model folder, its modules and the config of its network.

    Attributes:
        folder: Model folder.
        modules: Class name and path of each module of sentence-transformers; empty: no
            modules.json.
        config_name: Path of the network's config.json, relative to the folder.
        config: Hyperparameters of the network in that file.
        model_type: `model_type` in that file.
        family: Family of the network.
    """

    folder: ModelFolder
    modules: Sequence[tuple[str, str]]
    config_name: str
    config: Mapping[str, Any]
    model_type: str
    family: Family

    @property
    def transformer(self) -> str:
        """Subfolder of the encoder's files; "" is the model folder itself."""
        return self.modules[0][1] if self.modules else ""
