"""Token classification models, which label every token, as in transformers."""

from collections.abc import Mapping
from typing import Any

from models.export.families import Family
from models.export.model_folder import CheckpointError, check_required, first_class

_CLASS = "ForTokenClassification"
# transformers' pipeline applies softmax in all cases: it does not read `problem_type`.
ACTIVATION = "softmax"


def tags(config: Mapping[str, Any], family: Family) -> bool:
    """Return whether config.json describes a token classification model.

    A class whose head the family may ignore needs names of labels as well.
    """
    first = first_class(config)
    is_named = first not in family.ignored_heads or bool(config.get("id2label"))
    return first.endswith(_CLASS) and is_named


def check_supported(config: Mapping[str, Any], family: Family, name: str) -> None:
    """Raise CheckpointError if the head of the family's token classifiers is not supported."""
    if family.token_classifier is None:
        raise CheckpointError(
            f"{name}: architectures names {config['architectures'][0]}, but token classification "
            f"is not supported for this family (model_type {config.get('model_type')!r})"
        )
    check_required(config, family.token_classifier.required, name)
