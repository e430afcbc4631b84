"""Settings of a tokenizer that affect more than the tokens of a text, and its failures."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from models.export.model_folder import CheckpointError
from models.panics import panics_as_errors

# Files of a tokenizer in the format of transformers.
TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
# The largest public tokenizer.json has 33 MB.
MAX_TOKENIZER_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Settings of a tokenizer besides the tokens of a text.

    Attributes:
        max_length: Maximum length of a text, in tokens; None: no limit. Unchecked.
        truncation_side: Side on which texts with too many tokens are truncated, "left" or "right".
        padding_side: Side on which transformers pads rows, "left" or "right".
        gives_token_types: Whether the tokens of a pair's second text have type 1.
        mask_or_end_token: The mask token, or else the end token; None: it has neither.
        unweighted: Tokens that have no weight in the sparse vectors of BGE-M3 and GTE. Source:
            `_process_token_weights` in both projects.
        unknown_id: Id of the unknown token; -1: none.
        baseline_ids: See `models.manifest.Manifest`.
    """

    max_length: object = None
    truncation_side: str = "right"
    padding_side: str = "right"
    gives_token_types: bool = False
    mask_or_end_token: str | None = None
    unweighted: tuple[str, ...] = ()
    unknown_id: int = -1
    baseline_ids: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def text_failures(message: str = "the tokenizer fails on a text") -> Iterator[None]:
    """Raise errors and panics of the tokenizers library as `CheckpointError` with this message."""
    try:
        with panics_as_errors("the tokenizers library"):
            yield
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(f"{message}: {error}") from error
