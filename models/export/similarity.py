"""The similarity that a model declares for its vectors, as sentence-transformers reads it."""

from models.export.model_folder import CheckpointError, ModelFolder
from models.export.modules import MODEL_CONFIG
from models.manifest import SIMILARITIES, Output, SimilarityName

# Names in files of multi-vector models that stand for MaxSim: PyLate writes "MaxSim", and wrote the
# similarity of two tokens before. sentence-transformers reads all three as "maxsim".
_NAMES_OF_MAXSIM = ("MaxSim", "cosine", "dot")


def read_similarity(folder: ModelFolder, output: Output) -> SimilarityName | None:
    """Return the similarity of a model's vectors; None for a model without vectors.

    Args:
        folder: Model folder.
        output: First output of the model.

    Raises:
        CheckpointError: The declared similarity is unknown or does not apply to such vectors.
    """
    if output not in SIMILARITIES:
        return None  # CrossEncoder does not read the setting
    supported = SIMILARITIES[output]
    declared = folder.json(MODEL_CONFIG, dict, {}).get("similarity_fn_name")
    if declared is None or (output == "multi" and declared in _NAMES_OF_MAXSIM):
        return supported[0]
    for similarity in supported:
        if declared == similarity:
            return similarity
    raise CheckpointError(
        f"{MODEL_CONFIG}: similarity_fn_name is {declared!r}; supported for such vectors: "
        f"{', '.join(supported)}"
    )
