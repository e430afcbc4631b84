"""Rows of all lengths that calibrate an int8 graph, or measure its quality."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from tokenizers import Tokenizer

from models.export.calibration import TextRows, text_rows
from models.export.int8.texts import Corpus
from models.manifest import Manifest, TextSource

# Number of documents of each query of a reranker.
DOCUMENTS = 20
# Limits of the number of texts of a class. With 500, the standard error of recall is about 0.004.
_MIN_TEXTS, _MAX_TEXTS = DOCUMENTS + 1, 500
# Length of the longest row of the first class. Quality depends on length: activations depend on the
# position of a token, and on the number of tokens that it attends to.
_SHORT = 32
# Length of the longest rows, in tokens; rows of a graph may be longer.
_LONGEST = 2048


def length_classes(max_tokens: int) -> list[range]:
    """Return ranges of lengths: 1 to 32 tokens, 33 to 64 and so on, each twice as long.

    The last one ends with the maximum length, or with 2,048 tokens.
    """
    last = min(max_tokens, _LONGEST)
    ends = [0, _SHORT]
    while ends[-1] < last:
        ends.append(2 * ends[-1])
    ends[-1] = last
    return [range(start + 1, end + 1) for start, end in pairwise(ends)]


@dataclass(frozen=True)
class LengthRows:
    """Rows of a class of lengths.

    Attributes:
        source: Origin of the texts.
        lengths: Numbers of tokens, in which a prompt does not count.
        rows: The rows.
    """

    source: TextSource
    lengths: range
    rows: TextRows


def text_lengths(manifest: Manifest, tokenizer: Tokenizer, lengths: range) -> range:
    """Return the numbers of tokens of texts, without special ones, whose rows have given lengths.

    The two texts of a pair have half of the tokens each.
    """
    is_pair = reads_pairs(manifest)
    special = tokenizer.num_special_tokens_to_add(is_pair)
    shortest, longest = (
        max(1, (length - special) // (2 if is_pair else 1)) for length in (lengths[0], lengths[-1])
    )
    return range(shortest, longest + 1)


def longest_text(manifest: Manifest, tokenizer: Tokenizer) -> int:
    """Return the number of tokens of the longest text of a row, without special ones."""
    return text_lengths(manifest, tokenizer, length_classes(manifest.max_tokens)[-1])[-1]


def rows_by_length(
    manifest: Manifest, tokenizer: Tokenizer, corpus: Corpus, tokens: int
) -> list[LengthRows]:
    """Return the rows of each class of lengths.

    A prompt does not count, unless the row would exceed the maximum length.

    Args:
        manifest: Manifest of the model.
        tokenizer: Tokenizer of the artifact.
        corpus: Texts.
        tokens: Number of tokens of each class, within limits of the number of texts.
    """
    tokenizer.no_truncation()
    prompt = 0
    if manifest.default_prompt is not None:
        text = manifest.prompts[manifest.default_prompt]
        prompt = len(tokenizer.encode(text, add_special_tokens=False).ids)
    by_length: list[LengthRows] = []
    for lengths in length_classes(manifest.max_tokens):
        middle = (lengths[0] + lengths[-1]) // 2
        count = min(max(tokens // middle, _MIN_TEXTS), _MAX_TEXTS)
        source, texts = corpus.texts(text_lengths(manifest, tokenizer, lengths), count)
        limit = min(lengths[-1] + prompt, manifest.max_tokens)
        rows = quality_rows(replace(manifest, max_tokens=limit), tokenizer, texts)
        by_length.append(LengthRows(source, lengths, rows))
        tokenizer.no_truncation()
    return by_length


def within(rows: TextRows, tokens: int) -> TextRows:
    """Return the first rows, with at most a number of tokens, but at least one row."""
    count = max(1, int(np.searchsorted(np.cumsum([*map(len, rows.ids)]), tokens, "right")))
    types = None if rows.types is None else rows.types[:count]
    return replace(rows, ids=rows.ids[:count], types=types)


def joined_rows(parts: Sequence[TextRows]) -> TextRows:
    """Return all rows of several parts of one model."""
    ids = [row for part in parts for row in part.ids]
    types = [own for part in parts for own in part.types or ()]
    return replace(parts[0], ids=ids, types=types or None)


def reads_pairs(manifest: Manifest) -> bool:
    """Return whether the model is a reranker, whose rows are pairs of a query and a document."""
    return manifest.outputs == ("logits",) and len(manifest.labels) <= 1


def quality_rows(manifest: Manifest, tokenizer: Tokenizer, texts: Sequence[str]) -> TextRows:
    """Return the rows of texts; of a reranker, each query with its documents."""
    if not reads_pairs(manifest):
        return text_rows(manifest, tokenizer, texts)
    tokenizer.enable_truncation(manifest.max_tokens, direction=manifest.truncation_side)
    groups = range(0, len(texts) - DOCUMENTS, DOCUMENTS + 1)
    pairs = [
        (texts[start], document)
        for start in groups
        for document in texts[start + 1 : start + 1 + DOCUMENTS]
    ]
    encodings = tokenizer.encode_batch(pairs)
    return TextRows([e.ids for e in encodings], types=[e.type_ids for e in encodings])
