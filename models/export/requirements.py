"""The versions of packages that a model requires, as sentence-transformers reads them."""

import platform
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from models.export.model_folder import CheckpointError, ModelFolder
from models.export.modules import MODEL_CONFIG


def check_requirements(folder: ModelFolder) -> None:
    """Raise CheckpointError if a model requires another version of an installed package or Python.

    Packages that are not installed are not used. A requirement that is no specifier is ignored, as
    in sentence-transformers.
    """
    requirements = folder.json(MODEL_CONFIG, dict, {}).get("requirements")
    for package, own in requirements.items() if isinstance(requirements, dict) else ():
        name = "torch" if package == "pytorch" else package
        specifier = str(own.get("specifier", "") if isinstance(own, dict) else own)
        try:
            installed = platform.python_version() if name == "python" else version(name)
            is_met = SpecifierSet(specifier, prereleases=True).contains(installed)
        except (PackageNotFoundError, ValueError):
            continue
        if not is_met:
            raise CheckpointError(
                f"{MODEL_CONFIG}: the model requires {name}{specifier}, and {name} {installed} is "
                "installed"
            )
