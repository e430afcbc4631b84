"""Token classification models, which label every token, as in transformers."""

from models.export.model_files import ModelFiles
from models.export.model_folder import CheckpointError, check_required, first_class

_CLASS = "ForTokenClassification"
# transformers' pipeline applies softmax in all cases: it does not read `problem_type`.
ACTIVATION = "softmax"


def tags(files: ModelFiles) -> bool:
    """Return whether config.json describes a token classification model.

    A class whose head the family may ignore needs names of labels as well.
    """
    first = first_class(files.config)
    is_named = first not in files.family.ignored_heads or bool(files.config.get("id2label"))
    return first.endswith(_CLASS) and is_named


def check_supported(files: ModelFiles) -> None:
    """Raise CheckpointError if the head of the family's token classifiers is not supported."""
    name, config, head = files.config_name, files.config, files.family.token_classifier
    if head is None:
        raise CheckpointError(
            f"{name}: architectures names {config['architectures'][0]}, but token classification "
            f"is not supported for this family (model_type {config.get('model_type')!r})"
        )
    check_required(config, head.required, name)
