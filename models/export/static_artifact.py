"""The artifact of a static model: its manifest, self-check and comparison with PyTorch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.nn.functional import embedding, embedding_bag

from models.artifact import sha256
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.parity import ParityCase, Results
from models.export.sources import CheckpointSource
from models.export.static import StaticModel
from models.export.tokenizer_settings import text_failures
from models.manifest import EMBEDDINGS, TABLE_ENGINE, Check, Graph, Manifest
from models.packing import NO_ADAPTER, pack

# Lengths of random rows that are compared with PyTorch, in tokens.
_LENGTHS = (1, 2, 3, 5, 8, 13, 13, 34, 128, 512, 2048)
# Number of leading check inputs whose token vectors are stored.
_TOKEN_ROWS = 3


def static_check(model: StaticModel, texts: Sequence[str], limit: int) -> Check:
    """Return the inputs of the self-check with PyTorch's vectors.

    Args:
        model: The static model.
        texts: Text of each input.
        limit: Maximum length of an input, in tokens.

    Raises:
        CheckpointError: The vectors of all texts are zero, or the tokenizer fails on a text.
    """
    rules = model.rules
    with text_failures():
        encodings = model.tokenizer.encode_batch(list(texts))
    limit = min(limit, rules.max_tokens)
    rows = [
        [*rules.without_dropped(encoding.ids[:limit])] or [rules.filler] for encoding in encodings
    ]
    pooled = _means(model, rows)
    if not any(map(any, pooled)):
        raise CheckpointError("the static model has no vector other than zero for common texts")
    tokens = [
        vector
        for row in rows[:_TOKEN_ROWS]
        for vector in embedding(torch.tensor(row), model.table).tolist()
    ]
    outputs = {"pooled": pooled, "tokens": tokens}
    return Check(rows, outputs, list(texts), [NO_ADAPTER] * len(rows), [], [0] * len(rows))


def static_cases(model: StaticModel, check: Check) -> list[ParityCase]:
    """Return the test cases that compare the engine with PyTorch; see `models.export.parity`."""
    rng = np.random.default_rng(0)
    ids = np.flatnonzero(model.table.any(1).numpy())
    rows = [rng.choice(ids, length).tolist() for length in _LENGTHS]
    expected: Results = {"pooled": np.array(_means(model, rows), np.float32)}
    of_check: Results = {"pooled": np.array(check.outputs["pooled"], np.float32)}
    return [
        ParityCase("check inputs", tuple(pack([row]) for row in check.rows), of_check),
        ParityCase("each row alone", tuple(pack([row]) for row in rows), expected),
        ParityCase("in a batch", (pack(rows),), expected),
    ]


def _means(model: StaticModel, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the mean of the token vectors of each row, computed by PyTorch in float64."""
    starts = np.cumsum([0, *map(len, rows)])[:-1]
    ids = torch.tensor([token for row in rows for token in row])
    means = embedding_bag(ids, model.table.double(), torch.from_numpy(starts), mode="mean")
    return means.float().tolist()


def static_manifest(
    source: CheckpointSource,
    files: ModelFolder,
    model: StaticModel,
    file_hashes: Mapping[str, str],
    versions: Mapping[str, str],
    terms: str | None,
) -> Manifest:
    """Return the manifest of a static model.

    Args:
        source: Origin of the model folder.
        files: Model folder, whose weights were read.
        model: The static model.
        file_hashes: SHA-256 of the files of the artifact, by name.
        versions: Versions of the libraries used for the export, by library name.
        terms: License of the model; None: unknown.
    """
    vocab_size, width = model.table.shape
    table = Graph(
        file=EMBEDDINGS,
        weights=EMBEDDINGS,
        engine=TABLE_ENGINE,
        dtype="float32",
        opset=None,
        parity=None,
    )
    return Manifest(
        name=source.name,
        source=source.source,
        revision=source.revision,
        family="static",
        weights_sha256={name: sha256(files.locate(name)) for name in files.weights},
        outputs=("pooled", "tokens"),
        labels=(),
        activation="identity",
        width=width,
        hidden_size=width,
        windows=(),
        vocab_size=vocab_size,
        max_tokens=model.rules.max_tokens,
        pooling=("mean",),
        heads=(),
        include_prompt=True,
        normalize=model.normalize,
        similarity=model.similarity,
        matryoshka_dimensions=(),
        truncation_side=model.truncation_side,
        prompts=model.prompts,
        default_prompt=model.default_prompt,
        adapters=(),
        token_rules={"": model.rules},
        graphs=(table,),
        files=file_hashes,
        versions=versions,
        license=terms,
    )
