"""The manifest of an artifact, its self-check, and the names of its files.

Standard library only. Relations between fields are in `models.artifact_rules`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from models.typed_json import Float32, Number, form, length, within

FORMAT = 8
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECK = "check.json"
QUERY_WEIGHTS = "query_weights.npy"
EMBEDDINGS = "embeddings.npy"
CALIBRATION = "calibration.json"
SOURCE = "source"
SPACES = "spaces"
SIGNATURE = "model.sig"

# Engine of static models, whose vectors are means of the rows of a table, without a network.
TABLE_ENGINE = "numpy"

# Names of the outputs of graphs. From "weights", one weight per token, the service computes sparse
# vectors.
Output = Literal["pooled", "tokens", "logits", "sparse", "weights", "tags", "multi", "spans"]
# Similarities of two vectors, and MaxSim of two multi-vectors. "euclidean" and "manhattan" are
# negative distances, so that the most similar document has the highest score.
SimilarityName = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim"]
# Those that apply to a model's vectors, by its first output; sentence-transformers' default first.
SIMILARITIES: Mapping[Output, tuple[SimilarityName, ...]] = {
    "pooled": ("cosine", "dot", "euclidean", "manhattan"),
    "sparse": ("dot", "cosine", "euclidean", "manhattan"),
    "multi": ("maxsim",),
}

# Types and bounds of the fields below. The bounds are far above those of any model, and keep an
# artifact of unknown origin from taking the memory or the time of other models.
_Size = Annotated[int, within(1, 2**24)]
_Count = Annotated[int, within(0, 2**31)]
_TokenId = Annotated[int, within(0, 2**24)]
_Baseline = Annotated[str, form("pad|mask", "of pad and mask")]
_Position = Annotated[int, within(-1, 2**14)]
# Maximum length of a text that is not truncated, in tokens.
NO_LIMIT = 2**20
_Tokens = Annotated[int, within(1, NO_LIMIT)]
_Name = Annotated[str, length(1, 256)]
_Text = Annotated[str, length(0, 2**16)]
_Sha256 = Annotated[str, form("[0-9a-f]{64}", "with a SHA-256 in hexadecimal")]
# Part of the names of files.
_SpaceName = Annotated[str, form("[A-Za-z0-9_-]{1,64}", "of letters, digits and _-")]
# Names of measures are labels of metrics, and part of the header X-Engine.
_Measure = Annotated[str, form("[A-Za-z0-9_.-]{1,64}", "of letters, digits and _.-")]
_Pooling = Annotated[
    str,
    form("mean|cls|max|mean_sqrt_len|weighted_mean|last", "with the name of a pooling"),
]
# Every short row of a model is filled to this many tokens.
_MAX_MIN_TOKENS = 2048

# Origin of the texts that measure an int8 graph.
TextSource = Literal["own", "joined", "generated"]


class ArtifactError(Exception):
    """The artifact is incomplete, corrupted or of another format, or cannot be written."""


@dataclass(frozen=True, kw_only=True)
class LengthQuality:
    """Quality of an int8 graph for texts of a class of lengths.

    Attributes:
        source: "own" for the user's texts, "joined" if each is several of them, or "generated" from
            the vocabulary.
        min_tokens: Length of the shortest texts, in tokens without a prompt.
        max_tokens: Length of the longest texts.
        texts: Number of texts.
        measures: Results by measure, see `models.export.int8.quality`.
    """

    source: TextSource
    min_tokens: _Count
    max_tokens: _Count
    texts: _Count
    measures: Annotated[Mapping[_Measure, Number], length(0, 64)]


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Quality of an int8 graph, relative to the float32 graph of the artifact.

    Attributes:
        is_generated: Whether all texts were generated from the vocabulary.
        calibration_texts: Number of texts with which weights were rounded, joined ones included.
        evaluated_texts: Number of other texts, with which the quality was measured.
        measures: Lowest results of all classes of lengths, by measure.
        by_length: Results of each class; the user's texts first, then generated ones.
        check: Worst `cosine` and `norm` of the self-check, as in `models.engines.Agreement`, by
            output.
        costs: Relative error of each quantised layer alone, by layer name; the greatest first.
        float_layers: Names of the layers that stay in float.
    """

    is_generated: bool
    calibration_texts: _Count
    evaluated_texts: _Count
    measures: Annotated[Mapping[_Measure, Number], length(0, 64)]
    by_length: Annotated[tuple[LengthQuality, ...], length(0, 64)]
    check: Mapping[Output, Mapping[_Measure, Number]]
    costs: Mapping[_Name, Number]
    float_layers: tuple[_Name, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One ONNX file of an artifact, or the table of a static model.

    Attributes:
        file: File name in the directory.
        weights: Name of the file with the graph's weights, in the same directory; of a table, the
            same as `file`.
        engine: Name of the engine that runs the graph, in `models.engines.ENGINES`.
        dtype: Dtype of the weights, "float32", "float16" or "int8".
        opset: Opset version of the default ONNX domain; None for a table.
        parity: Worst agreement with PyTorch, measured at export: the fields `worst_cosine`,
            `worst_norm` and `max_abs` of `models.export.parity.Parity`. None if the engine was
            not usable, and for int8.
        quality: Quality measured at export, for int8; else None.
    """

    file: Annotated[_Name, form(r".+\.(onnx|npy)", "that ends with .onnx or .npy")]
    weights: _Name
    engine: _Name
    dtype: Annotated[str, form("float32|float16|int8", "of float32, float16 and int8")]
    opset: Annotated[int, within(1, 1000)] | None
    parity: Mapping[_Measure, Number] | None
    quality: Quality | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Rules for the tokens of one kind of text: queries, documents or others.

    Models with a vector or a weight per token, with looked-up queries, and static models have
    rules.

    Attributes:
        max_tokens: Maximum length in tokens, special tokens included.
        looks_up: Whether the weights of a sparse vector are looked up in `QUERY_WEIGHTS`, without
            the graph. Such rows have no special tokens.
        min_tokens: Length to which shorter rows are filled with `filler`; 0: rows are not filled.
        filler: Id of the token that fills short rows.
        attends_to_filler: Whether the tokens of a row attend to its added tokens.
        skipped: Ids of tokens without a vector in the result.
        kept: Ids of the only tokens with a vector in the result; empty: all that are not skipped.
        first: Position of the first token with a vector in the result.
        unweighted: Ids of tokens without a weight in the result.
        dropped: Ids of tokens that are removed from a row after its truncation.
        pool_factor: Number of vectors that are pooled into one, on average; 1: none.
        protected: Number of leading vectors that are not pooled.
        normalizes_pooled: Whether vectors are scaled to unit length after pooling.
        max_chars: Number of characters, prompt included, to which a text is truncated at its end
            before it is tokenised; None: no limit.
    """

    max_tokens: _Tokens
    looks_up: bool = False
    min_tokens: Annotated[int, within(0, _MAX_MIN_TOKENS)] = 0
    filler: _TokenId = 0
    attends_to_filler: bool = True
    skipped: tuple[_TokenId, ...] = ()
    kept: tuple[_TokenId, ...] = ()
    first: Annotated[int, within(0, 1000)] = 0
    unweighted: tuple[_TokenId, ...] = ()
    dropped: tuple[_TokenId, ...] = ()
    pool_factor: Annotated[float, within(1, 2**20)] = 1.0
    protected: _Count = 0
    normalizes_pooled: bool = False
    max_chars: _Size | None = None

    def without_dropped(self, ids: Sequence[int]) -> Sequence[int]:
        """Return token ids without those that are dropped."""
        for dropped in self.dropped:
            if dropped in ids:  # seldom
                ids = [token for token in ids if token != dropped]
        return ids


@dataclass(frozen=True, kw_only=True)
class PairTemplate:
    """Texts around a query and a document, with which a language model judges their relevance.

    A row has the tokens of `prefix`, of the body and of `suffix`, each tokenised as a text of its
    own. A body that is too long loses its end.

    Attributes:
        prefix: Text before the body.
        before_instruction: Text before the instruction. Without an instruction, the body has
            neither this text nor the next.
        after_instruction: Text after the instruction.
        before_query: Text before the query.
        before_document: Text between the query and the document.
        suffix: Text after the body.
        instruction: Default instruction; None: no instruction by default.
        splits_body: Whether the body is two texts, of which the first ends with the query and has
            at most three quarters of the tokens between prefix and suffix. False: it is one text.
    """

    prefix: _Text
    before_instruction: _Text
    after_instruction: _Text
    before_query: _Text
    before_document: _Text
    suffix: _Text
    instruction: _Text | None
    splits_body: bool

    @property
    def takes_instruction(self) -> bool:
        """Whether there is a place for an instruction."""
        return self.instruction is not None or bool(self.before_instruction)

    def body(self, query: str, document: str, instruction: str) -> tuple[str, str]:
        """Return the body, divided after the query; without an `instruction`, with the default."""
        own = (instruction or self.instruction) if self.takes_instruction else None
        first = self.before_query + query
        if own is not None:
            first = f"{self.before_instruction}{own}{self.after_instruction}{first}"
        return first, self.before_document + document


@dataclass(frozen=True, kw_only=True)
class SpanRules:
    """Rules for the rows of a model that finds entities with labels of the request.

    A row has the marker of labels before each label, the marker of the text, and the text's words.

    Attributes:
        label_marker: Token before each label, whose vector stands for the label.
        text_marker: Text before the words of the text; a token, if the vocabulary has it.
        max_words: Maximum number of words of a text.
        max_width: Maximum number of words of an entity.
    """

    label_marker: _Name
    text_marker: _Name
    max_words: _Tokens
    max_width: Annotated[int, within(1, 2**10)]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of an artifact.

    Attributes:
        name: Name of the model in responses.
        source: Origin of the checkpoint: a folder name, a package or a hub id.
        revision: Commit of a hub model or version of a package; None for a folder.
        family: `model_type` in the checkpoint's config.json, that of a GLiNER model's encoder, or
            "static".
        weights_sha256: SHA-256 of each weight file of the checkpoint, by name.
        outputs: Names of the graphs' outputs, in `models.engines.OUTPUTS`. The first output is
            the default of requests.
        labels: Label of each logit of a sequence or token classification model; empty for other
            models.
        activation: Activation that turns logits into scores: "sigmoid", "softmax" or "identity".
        width: Width of a vector of the first output.
        hidden_size: Width of a token vector.
        windows: Largest distance of two tokens that attend to each other, by layer; None: no limit.
        vocab_size: Size of the model's vocabulary.
        max_tokens: Maximum input length in tokens, special tokens included.
        pooling: Names of the poolings, whose results are concatenated.
        heads: Class names in `models.network.heads` of the modules after pooling, in order.
        include_prompt: Whether pooling includes prompt tokens.
        normalize: Whether vectors are normalised to unit length by default.
        similarity: Similarity of the served vectors of two texts, of the first output; None for
            models without vectors.
        matryoshka_dimensions: Widths of truncated row vectors that the model was trained for.
        truncation_side: Side on which inputs with too many tokens are truncated, "left" or "right".
        prompts: Texts that can be prepended to an input, by prompt name.
        default_prompt: Name of the default prompt; None: no prompt.
        adapters: Names of the adapters, in the order of their indices. An adapter applies to inputs
            with the prompt of the same name, or with one of `prompt_adapters`.
        token_rules: Rules for tokens by prompt name, "query" or "document"; the name "" stands for
            all others. Empty for models with one vector per text, all from an ONNX graph.
        graphs: Descriptions of the ONNX files, or of a static model's table of vectors.
        files: SHA-256 of every file except the manifest, by path relative to the artifact.
        versions: Versions of the libraries used for the export, by library name.
        pair_template: Texts around a query and a document. Prompts are instructions then. None: the
            tokenizer alone makes a row of a pair.
        spans: Rules for rows with labels; None: rows have none.
        has_experts: Whether a router chooses the experts that compute a token. Such a model runs in
            float32 only.
        spaces: Identity of the model in whose space each map of `models.spaces` ends, by the name
            of the space.
        license: License of the checkpoint, as its model card or config states it; None: neither
            does.
        unknown_id: Id of the token that transformers takes for the unknown one, which begins a
            word; -1: none. None for models that do not tag tokens, and in older artifacts.
        baseline_ids: Ids of the tokenizer's own padding token ("pad") and mask token ("mask"), with
            which gradients are compared. Either can be missing; both are in older artifacts.
        prompt_adapters: Names of the adapters that prompts of other names select. Empty in older
            artifacts.
    """

    name: _Text
    source: _Text
    revision: _Text | None
    family: _Text
    weights_sha256: Mapping[_Text, _Sha256]
    outputs: Annotated[tuple[Output, ...], length(1, 7)]
    labels: tuple[_Text, ...]
    activation: Annotated[str, form("sigmoid|softmax|identity", "of sigmoid, softmax and identity")]
    width: _Size
    hidden_size: _Size
    windows: Annotated[tuple[_Count | None, ...], length(0, 4096)]
    vocab_size: _Size
    max_tokens: _Tokens
    pooling: Annotated[tuple[_Pooling, ...], length(0, 64)]
    heads: Annotated[tuple[_Name, ...], length(0, 64)]
    include_prompt: bool
    normalize: bool
    similarity: SimilarityName | None
    matryoshka_dimensions: Annotated[tuple[_Size, ...], length(0, 1024)]
    truncation_side: Annotated[str, form("left|right", "of left and right")]
    prompts: Annotated[Mapping[_Text, _Text], length(0, 1024)]
    default_prompt: _Text | None
    adapters: Annotated[tuple[_Text, ...], length(0, 1024)]
    token_rules: Annotated[Mapping[_Text, TokenRules], length(0, 64)]
    graphs: Annotated[tuple[Graph, ...], length(0, 64)]
    files: Mapping[Annotated[str, length(1, 1024)], _Sha256]
    versions: Mapping[_Text, _Text]
    pair_template: PairTemplate | None = None
    spans: SpanRules | None = None
    has_experts: bool = False
    spaces: Annotated[Mapping[_SpaceName, _Sha256], length(0, 64)] = field(default_factory=dict)
    license: _Text | None = None
    unknown_id: Annotated[int, within(-1, 2**24)] | None = None
    baseline_ids: Mapping[_Baseline, _TokenId] = field(default_factory=dict)
    prompt_adapters: Annotated[Mapping[_Text, _Text], length(0, 64)] = field(default_factory=dict)

    @property
    def is_static(self) -> bool:
        """Whether vectors are means of the rows of a table, without a network."""
        return any(graph.engine == TABLE_ENGINE for graph in self.graphs)

    @property
    def pools_tokens(self) -> bool:
        """Whether a vector of a multi-vector can stand for several tokens."""
        return any(rules.pool_factor > 1 for rules in self.token_rules.values())

    @property
    def sha256(self) -> str:
        """SHA-256 of all fields, which have the hashes of all files."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Check:
    """Inputs of the self-check and their reference vectors, computed by PyTorch in float32.

    Attributes:
        rows: Token ids of each input.
        outputs: Reference vectors, by output name. "tokens" and "multi" have the vectors of
            the first few inputs, "tags" and "weights" those of all, one per token and concatenated.
            "spans" has those of all inputs, one per pair of a word and a label. The others have one
            vector per input.
        texts: Text of each input; empty for a classifier, whose inputs include pairs of texts, and
            for a model whose inputs include labels.
        adapters: Index of each input's adapter, or `models.packing.NO_ADAPTER`.
        token_types: Type of each token of each input; empty: all have type 0.
        unattended: Number of last tokens of each input that no token attends to.
        words: Position of the first token of each word of each input, or `models.packing.NO_TOKEN`;
            empty: no words.
        labels: Position of the token of each label of each input; empty: no labels.
    """

    rows: Annotated[list[Annotated[list[_TokenId], length(1, 2**14)]], length(1, 1024)]
    outputs: dict[str, Annotated[list[list[Float32]], length(1, 2**16)]]
    texts: list[str]
    adapters: list[Annotated[int, within(-1, 1024)]]
    token_types: list[list[Annotated[int, within(0, 1024)]]]
    unattended: list[_Count]
    words: tuple[Annotated[tuple[_Position, ...], length(1, 2**14)], ...] = ()
    labels: tuple[Annotated[tuple[_Count, ...], length(1, 2**10)], ...] = ()
