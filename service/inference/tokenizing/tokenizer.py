"""Conversion of texts to rows of token ids, validated and truncated to the model's length limit."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf
from typing import TypeVar, cast

from tokenizers import Encoding

from models.artifact import Artifact
from models.manifest import MANIFEST, TOKENIZER, ArtifactError, TokenRules
from models.packing import NO_ADAPTER, prompt_length
from models.panics import panics_as_errors
from service.inference.call_options import OnOverflow
from service.inference.errors import InvalidInput, TooLarge, convert_index
from service.inference.tokenizing.encodings import (
    TextEncodings,
    WordsEncoding,
    outer_span,
    slices,
    spans_of,
)
from service.inference.tokenizing.rows import (
    NO_PROMPT,
    Prompt,
    Row,
    Span,
    TokenizedText,
    fill_row,
    strip_span,
)
from service.inference.tokenizing.shared_tokenizers import (
    invalid_tokenizer_errors,
    shared_tokenizer,
)

# Spellings of the token that replaces text in an attribution baseline, by name of the baseline, for
# manifests that do not name it; the last one for padding is that of Qwen.
_BASELINE_TOKENS = {"pad": ("[PAD]", "<pad>", "<|endoftext|>"), "mask": ("[MASK]", "<mask>")}
# Spellings of the unknown token, for tokenizers whose model does not name it.
_UNKNOWN_TOKENS = ("[UNK]", "<unk>")

_TEXT = frozenset({str})

Input = TypeVar("Input")


class TextTokenizer:
    """The tokenizer of an artifact. Its methods may be called from any thread.

    Args:
        artifact: Artifact with the tokenizer, the prompts and the maximum number of tokens.
        max_chars: Maximum number of characters per text; a longer text raises `TooLarge`.
        max_whole_chars: The same, with the prompt, for a text that is tokenised whole, because it
            is divided into chunks, or has no place to cut it (see `text_parts`); None: no limit of
            its own.

    Attributes:
        manifest: Manifest of the artifact.
        shared: The tokenizer without prompts and rules, which artifacts share.
        encodings: Encodings of texts without prompts and rules.

    Raises:
        ArtifactError: The tokenizer is invalid, or does not fit the manifest.
    """

    def __init__(
        self, artifact: Artifact, max_chars: int, max_whole_chars: int | None = None
    ) -> None:
        manifest = artifact.manifest
        self.shared = shared_tokenizer(artifact.read(TOKENIZER))
        self._special_tokens = self.shared.special_tokens
        self.manifest = manifest
        self._max_chars = max_chars
        self._network_rules = TokenRules(max_tokens=manifest.max_tokens)
        self._rules = {"": self._network_rules, **manifest.token_rules}
        self._check_manifest()
        with invalid_tokenizer_errors():
            self._tokenizer = self.shared.variant(manifest.max_tokens)
            for rules in self._rules.values():  # in advance, because it takes long
                self.shared.variant(rules.max_tokens, is_left=self.drops_left("truncate"))
            if max_whole_chars is None:
                max_whole_chars = max_chars + max(map(len, manifest.prompts.values()), default=0)
            self.encodings = TextEncodings(self.shared, max_whole_chars)
            adapters = {name: index for index, name in enumerate(manifest.adapters)}
            self._prompts = {
                name: Prompt(
                    text,
                    0 if manifest.include_prompt or not text else self._prompt_tokens(text),
                    adapters.get(manifest.prompt_adapters.get(name, name), NO_ADAPTER),
                )
                for name, text in manifest.prompts.items()
            }

    def _check_manifest(self) -> None:
        """Check that the tokenizer and the manifest fit together."""
        vocab_size, largest = self.manifest.vocab_size, self.shared.largest_id
        if largest >= vocab_size:
            raise ArtifactError(
                f"{TOKENIZER} has the token id {largest}; vocab_size in {MANIFEST} is {vocab_size}"
            )
        added = {"a text": self._special_tokens}
        if "logits" in self.manifest.outputs:
            added["a pair of texts"] = self.shared.special_tokens_of_pair
        shortest = min(
            rules.max_tokens
            for rules in (self._network_rules, *self._rules.values())
            if not rules.looks_up
        )
        for input_name, count in added.items():
            if shortest <= count:
                raise ArtifactError(
                    f"{MANIFEST}: max_tokens is {shortest}, and {TOKENIZER} adds {count} special "
                    f"tokens to {input_name}"
                )

    def rows(
        self,
        inputs: Sequence[str | Sequence[int]],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        with_offsets: bool = False,
        default_prompt: str | None = None,
    ) -> list[Row]:
        """Return the row of each text and of each list of token ids, in the order of the inputs.

        Without `prompt_name`, texts have the prompt `default_prompt`, or else the model's default.

        Raises:
            InvalidInput: An input is empty or otherwise invalid (see `rows_of_texts` and
                `rows_of_ids`), or `prompt_name` is set for a list of token ids, and the model has
                neither adapters nor rules for the tokens of that prompt.
            TooLarge: A text has too many characters.
        """
        refuse_empty(inputs)
        own = default_prompt if prompt_name is None else prompt_name
        if _TEXT.issuperset(map(type, inputs)):  # nearly always
            texts_only = cast(Sequence[str], inputs)
            return self.rows_of_texts(texts_only, own, on_overflow, with_offsets)
        ids = {index: row for index, row in enumerate(inputs) if not isinstance(row, str)}
        texts = {index: text for index, text in enumerate(inputs) if isinstance(text, str)}
        applies = self.manifest.adapters or prompt_name in self.manifest.token_rules
        if ids and prompt_name is not None and not applies:
            raise InvalidInput(
                "prompt_name applies to texts, not to token ids", pointer="/prompt_name"
            )
        rows = by_index(
            texts, lambda texts: self.rows_of_texts(texts, own, on_overflow, with_offsets)
        )
        rows |= by_index(ids, lambda ids: self.rows_of_ids(ids, own, on_overflow))
        return [rows[index] for index in range(len(inputs))]

    def rows_of_texts(
        self,
        texts: Sequence[str],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        with_offsets: bool = False,
    ) -> list[Row]:
        """Tokenize each text, with the named or the default prompt prepended, into a row.

        Texts without tokens of their own, such as an empty one, have those that the model adds.

        Raises:
            InvalidInput: A text cannot be encoded in UTF-8, or no token is left to pool. The prompt
                is unknown or leaves no room for the text. A text is too long, and `on_overflow` is
                "error". A text is too long, and truncation would drop the start of a prompt that is
                excluded from pooling.
            TooLarge: A text has too many characters.
        """
        return [row for row, _ in self._encoded_rows(texts, prompt_name, on_overflow, with_offsets)]

    def rows_with_offsets(
        self, texts: Sequence[str], prompt_name: str | None, on_overflow: OnOverflow
    ) -> list[tuple[Row, Encoding]]:
        """Tokenize each text into a row with the spans of its tokens; see `rows_of_texts`.

        Each row has the encoding of the library beside it.

        Raises:
            VitrineError: Any error of `rows_of_texts`, under the same conditions.
        """
        encoded = self._encoded_rows(texts, prompt_name, on_overflow, with_offsets=True)
        return cast(list[tuple[Row, Encoding]], encoded)

    @cached_property
    def unknown_id(self) -> int | None:
        """Token id that stands for what is not in the vocabulary; None: there is none."""
        own = getattr(self._tokenizer.model, "unk_token", None)
        return self._first_id((own,) if own else _UNKNOWN_TOKENS)

    def unknown_spans(
        self, text: str, prompt_name: str | None, on_overflow: OnOverflow
    ) -> list[Span]:
        """Return the span of each part of a text that the model reads as the unknown token.

        Raises:
            InvalidInput: The prompt is unknown.
            TooLarge: The text has too many characters.
        """
        prompt, rules = self.prompt(prompt_name).text, self.rules(prompt_name)
        is_left = self.drops_left(on_overflow)
        (encoding,) = self._encodings([prompt + text], rules, is_left, with_offsets=True)
        spans = spans_of(cast(Encoding, encoding), len(prompt))
        return self.spans_of_unknown(text, spans, encoding.ids)

    def spans_of_unknown(
        self, text: str, spans: Sequence[Span | None], ids: Sequence[int | None]
    ) -> list[Span]:
        """Return the spans of unknown tokens in a text, without the white space at their ends.

        Args:
            text: The text.
            spans: Span of each token in the text; None: it has none.
            ids: Token ids.
        """
        pairs = zip(spans, ids, strict=True)
        own = [span for span, token in pairs if span is not None and token == self.unknown_id]
        return [strip_span(text, *span) for span in own if text[slice(*span)].strip()]

    def read_span(self, text: str, prompt_name: str | None, on_overflow: OnOverflow) -> Span:
        """Return the span of a text that is left after truncation, in characters.

        Raises:
            VitrineError: Any error of `rows_of_texts`, under the same conditions.
        """
        (row,) = self.rows_of_texts([text], prompt_name, on_overflow, with_offsets=True)
        if not row.truncated:
            return 0, len(text)
        return outer_span(row.offsets or (), text, drops_left=self.drops_left(on_overflow))

    def count(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens, prompt and truncation."""
        return len(self.encodings.without_special([text])[0].ids) if text else 0

    def room(self, prompt_name: str | None) -> int:
        """Return the number of tokens of a text that fits without truncation, prompt not counted.

        Raises:
            InvalidInput: The prompt is unknown.
        """
        rules, prompt = self.rules(prompt_name), self.prompt(prompt_name).text
        special = 0 if rules.looks_up else self._special_tokens
        return rules.max_tokens - special - self.count(prompt)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, truncated to the maximum length, without a prompt."""
        is_left, limit = self.drops_left("truncate"), self.manifest.max_tokens
        encoded = self.encodings.encode_truncated(texts, limit, is_left=is_left)
        return [encoding.ids for encoding in encoded]

    def with_prompt(self, text: str, prompt_name: str | None) -> str:
        """Return the text with the named or the default prompt prepended.

        The prompts of a model with a template of pairs are instructions, and not prepended.

        Raises:
            InvalidInput: The prompt is unknown.
        """
        prompt = self.prompt(prompt_name).text
        return text if self.manifest.pair_template else prompt + text

    def rows_of_ids(
        self, inputs: Sequence[Sequence[int]], prompt_name: str | None, on_overflow: OnOverflow
    ) -> list[Row]:
        """Return the row of each list of token ids, without adding special tokens.

        The named or the default prompt selects the adapter and the rules for tokens. Its text is
        not prepended.

        Raises:
            InvalidInput: The prompt is unknown, a list is empty, an id is not in the vocabulary, or
                a list is too long and `on_overflow` is "error".
        """
        self._check_ids(inputs)
        rules = self.rules(prompt_name)
        limit = rules.max_tokens
        kept = slice(-limit, None) if self.drops_left(on_overflow) else slice(limit)
        adapter = self.prompt(prompt_name).adapter
        rows = [
            Row(
                rules.without_dropped(list(ids[kept])),
                *(len(ids) > limit, 0, adapter),
                is_looked_up=rules.looks_up,
            )
            for ids in inputs
        ]
        check_overflow([row.truncated for row in rows], on_overflow, limit)
        return [fill_row(row, rules) for row in rows]

    def token(self, token_id: int) -> str:
        """Return the spelling of a token in the vocabulary."""
        return str(self._tokenizer.id_to_token(token_id))

    def tokenized_text(self, text: str, prompt_name: str | None) -> TokenizedText:
        """Return the tokens, spans and baselines of one text.

        Raises:
            InvalidInput: The text is invalid (see `rows_of_texts`), has no tokens of its own, or is
                too long for the model.
            TooLarge: The text has too many characters.
        """
        if self.manifest.pair_template:
            raise not_a_pair(0)
        refuse_empty([text])
        ((row, encoding),) = self.rows_with_offsets([text], prompt_name, "error")
        spans = row.offsets or ()
        sequence_ids = [None if span is None else 0 for span in spans]
        added = [self.token(token_id) for token_id in row.ids[len(encoding.ids) :]]
        tokens = [*encoding.tokens, *added]
        return self.with_baselines([text], row, tokens, spans, sequence_ids)

    def with_baselines(
        self,
        texts: Sequence[str],
        row: Row,
        tokens: Sequence[str],
        spans: Sequence[Span | None],
        sequence_ids: Sequence[int | None],
    ) -> TokenizedText:
        """Return a row with what its tokens show, and with the baselines that the vocabulary has.

        Args:
            texts: The text, or both texts of a pair.
            row: Row of the texts.
            tokens: Spelling of each token.
            spans: See `TokenizedText`.
            sequence_ids: See `TokenizedText`.

        Raises:
            InvalidInput: No token stands for a part of a text.
        """
        if all(span is None for span in spans):
            raise without_tokens(0)
        baseline = {
            name: [
                token if span is None else replacement
                for token, span in zip(row.ids, spans, strict=True)
            ]
            for name, replacement in self.baseline_ids.items()
        }
        return TokenizedText(texts, row, tokens, spans, sequence_ids, baseline)

    @cached_property
    def baseline_ids(self) -> Mapping[str, int]:
        """Id of the token that replaces text in a baseline, by name of the baseline, if any."""
        ids = {name: self._first_id(tokens) for name, tokens in _BASELINE_TOKENS.items()}
        known = {name: token for name, token in ids.items() if token is not None}
        return {**known, **self.manifest.baseline_ids}

    def token_id(self, token: str) -> int | None:
        """Return the id of the vocabulary entry with this spelling; None if there is none."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def tokenize(
        self, texts: Sequence[str], prompt_name: str | None, add_special_tokens: bool, limit: int
    ) -> list[list[tuple[int, str, Span | None]]]:
        """Return the id, text and byte span of each token of each text, prompt tokens included.

        Texts are not truncated. Spans count UTF-8 bytes from the start of the prompt. The span of a
        special token is None, and its text is its spelling in the vocabulary.

        Args:
            texts: Texts to tokenise.
            prompt_name: Name of the prompt to prepend to each text; None: the default prompt.
            add_special_tokens: Whether to add the model's special tokens.
            limit: Maximum total number of tokens.

        Raises:
            InvalidInput: A text is empty or cannot be encoded in UTF-8, the prompt is unknown, or
                the texts have more than `limit` tokens in total.
            TooLarge: A text has too many characters.
        """
        refuse_empty(texts)
        for index, text in enumerate(texts):
            self.check_text(text, index)
        prompt = self.with_prompt("", prompt_name)
        tokens: list[list[tuple[int, str, Span | None]]] = []
        for part in slices(texts):
            prompted = [prompt + text for text in part]
            encodings = self.encodings.encode_whole(prompted, with_special=add_special_tokens)
            limit -= sum(map(len, encodings))
            if limit < 0:
                raise InvalidInput(
                    "the texts have more tokens than one response may list; send fewer or shorter "
                    "texts",
                    code="too_many_tokens",
                    pointer="/inputs",
                )
            tokens += [_tokens(*pair) for pair in zip(prompted, encodings, strict=True)]
        return tokens

    def decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Return the text of each list of token ids.

        Raises:
            InvalidInput: A list is empty, or an id is not in the vocabulary.
        """
        self._check_ids(rows)
        with panics_as_errors("the tokenizer"):
            texts: list[str] = self._tokenizer.decode_batch(rows, skip_special_tokens)
        return texts

    def _encoded_rows(
        self,
        texts: Sequence[str],
        prompt_name: str | None,
        on_overflow: OnOverflow,
        with_offsets: bool,
    ) -> list[tuple[Row, Encoding | WordsEncoding]]:
        """Return the row of each text, and its encoding: with offsets, that of the library."""
        for index, text in enumerate(texts):
            self.check_text(text, index)
        prompt, rules = self.prompt(prompt_name), self.rules(prompt_name)
        is_left = self.drops_left(on_overflow)
        max_chars = inf if rules.max_chars is None or is_left else rules.max_chars
        encoded: list[tuple[Row, Encoding | WordsEncoding]] = []
        for part in slices(texts):
            prompted = [prompt.text + text for text in part] if prompt.text else part
            is_cut = [len(text) > max_chars for text in prompted]
            if any(is_cut):
                prompted = [text[: rules.max_chars] for text in prompted]
            encodings = self._encodings(prompted, rules, is_left, with_offsets)
            for encoding, lost_chars in zip(encodings, is_cut, strict=True):
                ids: Sequence[int] = encoding.ids
                spans = None
                if with_offsets:
                    spans = spans_of(cast(Encoding, encoding), len(prompt.text))
                if rules.dropped:
                    if spans:
                        pairs = zip(spans, ids, strict=True)
                        spans = [span for span, token in pairs if token not in rules.dropped]
                    ids = rules.without_dropped(ids)
                is_truncated = lost_chars or bool(encoding.overflowing)
                row = Row(
                    ids,
                    is_truncated,
                    prompt.tokens,
                    prompt.adapter,
                    spans,
                    is_looked_up=rules.looks_up,
                )
                if len(ids) < rules.min_tokens:
                    row = fill_row(row, rules)
                if row.truncated or len(row.ids) - row.unattended <= prompt.tokens:
                    self._check_row(row, len(encoded), on_overflow, rules)
                encoded.append((row, encoding))
        return encoded

    def _encodings(
        self, texts: Sequence[str], rules: TokenRules, is_left: bool, with_offsets: bool
    ) -> Sequence[Encoding | WordsEncoding]:
        if not (with_offsets or rules.looks_up):
            by_words = self.encodings.of_words(texts, rules.max_tokens)
            if by_words is not None:
                return by_words
        return self.encodings.encode_truncated(
            texts,
            rules.max_tokens,
            is_left=is_left,
            with_offsets=with_offsets,
            with_special=not rules.looks_up,
        )

    def _check_row(self, row: Row, index: int, on_overflow: OnOverflow, rules: TokenRules) -> None:
        """Check the row of a text that was truncated, or has no tokens after its prompt."""
        if row.truncated and row.prompt_tokens and self.drops_left(on_overflow):
            raise InvalidInput(
                "the text is too long, and its left end cannot be truncated because the prompt "
                "there is excluded from pooling; shorten the text",
                code="too_long",
                index=index,
            )
        if len(row.ids) - row.unattended <= row.prompt_tokens:
            if row.truncated:
                raise InvalidInput(
                    "the prompt leaves no room for the text within the model's maximum length",
                    code="too_long",
                    index=index,
                )
            if not rules.looks_up:  # the sum of no weights is an empty vector
                raise without_tokens(index)
        if row.truncated and on_overflow == "error":
            raise _too_long(index, rules.max_tokens, rules.max_chars)

    def rules(self, prompt_name: str | None) -> TokenRules:
        """Return the rules for the tokens of texts with a prompt; None: with the default prompt."""
        return self._rules.get(prompt_name or "", self._rules[""])

    def drops_left(self, on_overflow: OnOverflow) -> bool:
        """Return whether an input that is too long loses its first tokens, not its last."""
        own = self.manifest.truncation_side == "left" and on_overflow != "truncate_right"
        return own or on_overflow == "truncate_left"

    def check_text(self, text: str, index: int) -> None:
        """Check a text before it is tokenised.

        Args:
            text: Text to check.
            index: Index of the text, for the error.

        Raises:
            InvalidInput: The text has a lone surrogate, so that it cannot be encoded in UTF-8.
            TooLarge: The text has too many characters.
        """
        if len(text) > self._max_chars:
            raise TooLarge(
                f"the text has {len(text)} characters; the limit is {self._max_chars}",
                code="text_too_large",
                index=index,
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise InvalidInput(
                    "the text contains half of a surrogate pair and cannot be encoded in UTF-8",
                    index=index,
                ) from None

    def _check_ids(self, inputs: Sequence[Sequence[int]]) -> None:
        for index, ids in enumerate(inputs):
            if not ids:
                raise InvalidInput("the list of token ids is empty", code="empty", index=index)
            if min(ids) < 0 or max(ids) >= self.manifest.vocab_size:
                raise InvalidInput(
                    f"token ids must be from 0 to {self.manifest.vocab_size - 1}",
                    code="id_out_of_range",
                    index=index,
                )

    def prompt(self, name: str | None) -> Prompt:
        """Return the named or default prompt."""
        if name is None:
            name = self.manifest.default_prompt
        if name is None:
            return NO_PROMPT
        if name not in self._prompts:
            names = ", ".join(sorted(self._prompts)) or "none"
            raise InvalidInput(
                f"unknown prompt; the model's prompts: {names}",
                code="unknown_prompt",
                pointer="/prompt_name",
            )
        return self._prompts[name]

    def _prompt_tokens(self, prompt: str) -> int:
        """Return the number of tokens of a prompt, including the special tokens before it."""
        ids = self._tokenizer.encode(prompt).ids
        return prompt_length(ids, self._tokenizer.get_added_tokens_decoder())

    def _first_id(self, spellings: Sequence[str]) -> int | None:
        ids = map(self._tokenizer.token_to_id, spellings)
        return next((token for token in ids if token is not None), None)


def refuse_empty(inputs: Sequence[str | Sequence[int]]) -> None:
    """Raise `InvalidInput` for the first empty text, as OpenAI's API and TEI do for embeddings."""
    if "" in inputs:
        raise InvalidInput("the text is empty", code="empty", index=list(inputs).index(""))


def without_tokens(index: int) -> InvalidInput:
    """Return the error of a text that leaves no token to pool, or to attribute to."""
    return InvalidInput(
        "the text has no tokens of its own: the tokenizer drops its characters or joins them to "
        "the prompt",
        code="no_tokens",
        index=index,
    )


def not_a_pair(index: int) -> InvalidInput:
    """Return the error of a single text, for a model that reads pairs only."""
    return InvalidInput(
        "the model reads a query and a document in a template; send them as a pair", index=index
    )


def check_overflow(too_long: Sequence[bool], on_overflow: OnOverflow, limit: int) -> None:
    """Raise `InvalidInput` for the first input that is too long, if `on_overflow` is "error"."""
    if on_overflow == "error" and True in too_long:
        raise _too_long(list(too_long).index(True), limit)


def _too_long(index: int, limit: int, max_chars: int | None = None) -> InvalidInput:
    chars = "" if max_chars is None else f" or {max_chars} characters"
    return InvalidInput(
        f"the input has more than {limit} tokens{chars}, the model's maximum",
        code="too_long",
        index=index,
    )


def by_index(
    inputs: Mapping[int, Input], rows_of: Callable[[Sequence[Input]], list[Row]]
) -> dict[int, Row]:
    """Return the row of each input, by index in the request.

    If `rows_of` raises an error, the error's index is converted to the index in the request.

    Args:
        inputs: Inputs of one kind, by index in the request.
        rows_of: Returns the rows of a list of inputs.
    """
    indices = list(inputs)
    with convert_index(indices.__getitem__):
        return dict(zip(indices, rows_of(list(inputs.values())), strict=True))


def _tokens(text: str, encoding: Encoding) -> list[tuple[int, str, Span | None]]:
    # Byte offset of each character in UTF-8.
    starts = list(accumulate((len(char.encode()) for char in text), initial=0))
    return [
        (token_id, token, None)
        if special
        else (token_id, text[begin:end], (starts[begin], starts[end]))
        for token_id, token, special, (begin, end) in zip(
            encoding.ids,
            encoding.tokens,
            encoding.special_tokens_mask,
            encoding.offsets,
            strict=True,
        )
    ]
