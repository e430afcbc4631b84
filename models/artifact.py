"""The artifact: the directory written by export and read by the service. Standard library only.

    manifest.json     description of the artifact, with the SHA-256 of every other file
    model.onnx        graph for onnxruntime on CPUs; model.openvino.onnx for OpenVINO
    model.weights     weights of both; engines map this file into memory
    tokenizer.json    tokenizer, without truncation and padding
    check.json        inputs of the self-check, their token ids, and PyTorch's vectors for them
    query_weights.npy weights of queries, of a sparse model that only looks them up (optional)
    embeddings.npy    vector of each token, of a static model, which has no graph
    calibration.json  ranges of the vectors' dimensions, for quantised vectors (optional)
    spaces/           maps of queries into the spaces of other models (optional)
    model.sig         signature of all other files, which the manifest does not list (optional)
    source/           weights and config of the reference model, for gradients (optional)

With `--target cuda` there are model.cuda.onnx and model.cuda.weights as well, and with
`--precision int8` model.int8.onnx and model.int8.weights, for OpenVINO.

An artifact is written to a temporary directory, which is renamed when complete. It has regular
files and folders only, and exactly those of its manifest. A file is rejected when it is read if its
SHA-256 differs from the manifest's. Where a signature is required, it is verified before the
manifest is parsed, so the manifest's hashes are signed ones. Engines keep the weights mapped: files
of an artifact in use must not be changed in place.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from models.artifact_rules import check_manifest, check_self_check
from models.json_reader import parse_json
from models.printable import printable
from models.typed_json import Float32, Number, form, length, read_dataclass, shown, within

if TYPE_CHECKING:  # needs cryptography
    from models.signing import Signature

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
_Position = Annotated[int, within(-1, 2**14)]
_Tokens = Annotated[int, within(1, 2**20)]
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

# Maximum size of files that are read into memory, in bytes. The largest known tokenizer.json has
# 33 MB.
_MAX_BYTES = {
    MANIFEST: 4 * 2**20,
    TOKENIZER: 64 * 2**20,
    CHECK: 32 * 2**20,
    QUERY_WEIGHTS: 65 * 2**20,
    CALIBRATION: 32 * 2**20,
    SIGNATURE: 8 * 2**20,
}

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

    def retained(self, ids: Sequence[int]) -> Sequence[int]:
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
            with the prompt of the same name.
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


@dataclass(frozen=True)
class Artifact:
    """A directory with exactly the files listed in its manifest, and perhaps their signature.

    Attributes:
        path: The directory.
        manifest: Its manifest.
        signed_by: Hint of the key that verified the signature, see `models.signing.key_hint`; None:
            no signature was required.
    """

    path: Path
    manifest: Manifest
    signed_by: str | None = None

    @classmethod
    def load(cls, path: Path, verify: str | Path | None = None) -> "Artifact":
        """Return the artifact in the directory `path`.

        File contents are verified later, by `read` and `verify`.

        Args:
            path: The directory.
            verify: PEM file with a public key, or the certificate of one, that must verify the
                signature of the manifest and of the files that it lists; None: any signature is
                ignored.

        Raises:
            ArtifactError: The directory has no manifest, the manifest is invalid or has an
                unsupported format version, or the other files differ from those that it lists. A
                file or folder is a symbolic link, or something else that is not regular. The
                signature is missing or invalid, or is one of other files. The file `verify` has
                no key.
        """
        if not (path / MANIFEST).is_file():
            raise ArtifactError(
                f"{path} is not an artifact: it has no {MANIFEST}, which vitrine-export writes"
            )
        present = set(_regular_files(path))
        with _open_regular(path, MANIFEST) as stream:
            content = _read_all(stream, MANIFEST)
        signature = None if verify is None else _signature(path, Path(verify))
        if signature is not None:
            signature.check(path.name, {MANIFEST: hashlib.sha256(content).hexdigest()})
        manifest = _parse(content)
        listed = {MANIFEST, *manifest.files}
        signed = {*signature.files} if signature else set()
        for problem, names, remedy in (
            ("lacks", (listed | signed) - present, "copy or export it again"),
            ("has an unlisted", present - listed - {SIGNATURE}, "remove it"),
        ):
            if names:
                file = printable(min(names))
                raise ArtifactError(f"the artifact {path.name} {problem} file {file}: {remedy}")
        if signature is None:
            return cls(path, manifest)
        signature.check(path.name, manifest.files)
        return cls(path, manifest, signature.hint)

    def read(self, name: str) -> bytes:
        """Return the verified content of a file.

        Raises:
            ArtifactError: The manifest does not list the file, the file is not a regular file, or
                its SHA-256 differs from the manifest's.
        """
        if name not in self.manifest.files:
            raise ArtifactError(
                f"the manifest of the artifact {self.path.name} does not list {name}"
            )
        with self._open(name) as stream:
            content = _read_all(stream, name)
        self._check_hash(name, hashlib.sha256(content).hexdigest())
        return content

    def verify(self, name: str) -> Path:
        """Verify a file and return its path, without reading all of the file into memory.

        A change after the verification is not detected when the caller opens the file.

        Raises:
            ArtifactError: The manifest does not list the file, the file is not a regular file, or
                its SHA-256 differs from the manifest's.
        """
        with self._open(name) as stream:
            self._check_hash(name, hashlib.file_digest(stream, "sha256").hexdigest())
        return self.path / name

    def verify_all(self) -> None:
        """Verify every file that the manifest lists; see `verify`."""
        for name in self.manifest.files:
            self.verify(name)

    def _open(self, name: str) -> BufferedReader:
        if name not in self.manifest.files:
            raise ArtifactError(
                f"the manifest of the artifact {self.path.name} does not list {name}"
            )
        return _open_regular(self.path, name)

    def _check_hash(self, name: str, actual: str) -> None:
        if actual != self.manifest.files[name]:
            raise ArtifactError(
                f"{name} in the artifact {self.path.name} is not the exported file: "
                "its SHA-256 differs from the manifest's; export again"
            )

    def graph(self, engine: str, dtype: str | None = None) -> Graph:
        """Return the description of the graph for an engine.

        Args:
            engine: Name in `models.engines.ENGINES`.
            dtype: Dtype of the graph's weights; None: that of the engine's first graph.

        Raises:
            ArtifactError: The artifact has no such graph.
        """
        for graph in self.manifest.graphs:
            if graph.engine == engine and dtype in (None, graph.dtype):
                return graph
        kind = f"{engine} in {dtype}" if dtype else engine
        raise ArtifactError(f"the artifact {self.path.name} has no graph for {kind}")

    def graph_sha256(self, engine: str, dtype: str | None = None) -> str:
        """Return the SHA-256 of an engine's graph and weights, in hexadecimal.

        The hash is computed from the two files' hexadecimal SHA-256, concatenated, graph first.
        Arguments are those of `graph`.

        Raises:
            ArtifactError: The artifact has no such graph.
        """
        graph = self.graph(engine, dtype)
        digests = self.manifest.files[graph.file] + self.manifest.files[graph.weights]
        return hashlib.sha256(digests.encode()).hexdigest()

    def check(self) -> Check:
        """Return the inputs and reference vectors of the self-check, which are parsed once.

        Raises:
            ArtifactError: check.json cannot be read, is invalid, or differs from the exported file.
        """
        return self._check

    @cached_property
    def _check(self) -> Check:
        try:
            check = read_dataclass(Check, parse_json(self.read(CHECK)))
            check_self_check(check, self.manifest)
        except ValueError as error:
            raise ArtifactError(f"{CHECK} is invalid: {error}") from error
        return check


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to `path` if the block ends without an error.

    Raises:
        ArtifactError: `path` already exists.
    """
    if path.exists():
        raise ArtifactError(f"{path} already exists; remove it or choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    # mkdtemp creates directories with mode 0700, and the service may run as another user.
    temporary.chmod(0o755)
    try:
        yield temporary
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file in `folder` and its subfolders, by relative path."""
    return {
        str(file.relative_to(folder)): sha256(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest` to manifest.json in `folder`."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", "utf-8")


def write_check(folder: Path, check: Check) -> None:
    """Write the inputs and reference vectors of the self-check to check.json in `folder`."""
    (folder / CHECK).write_text(json.dumps(asdict(check)), "utf-8")


def _parse(content: bytes) -> Manifest:
    try:
        values = parse_json(content)
        if isinstance(values, dict) and (version := values.pop("format", None)) != FORMAT:
            raise ArtifactError(
                f"{MANIFEST} has format {shown(version)}; format {FORMAT} is required: export again"
            )
        manifest = read_dataclass(Manifest, values)
        check_manifest(manifest)
        _check_similarity(manifest)
    except ValueError as error:
        raise ArtifactError(f"{MANIFEST} is invalid: {error}") from error
    return manifest


def _signature(path: Path, key: Path) -> "Signature":
    """Return the verified signature of an artifact."""
    from models.signing import SignatureError, read_public_key, verify_signature

    public_key = read_public_key(key)
    if not os.path.lexists(path / SIGNATURE):
        raise ArtifactError(
            f"the artifact {path.name} has no signature {SIGNATURE}, which vitrine sign writes"
        )
    with _open_regular(path, SIGNATURE) as stream:
        content = _read_all(stream, SIGNATURE)
    try:
        return verify_signature(content, public_key)
    except SignatureError as error:
        raise ArtifactError(
            f"the signature {SIGNATURE} of the artifact {path.name} {error}"
        ) from None


def _read_all(stream: BufferedReader, name: str) -> bytes:
    """Return the content of a file, whose size is limited if the service reads it."""
    limit = _MAX_BYTES.get(name)
    content = stream.read() if limit is None else stream.read(limit + 1)
    if limit is not None and len(content) > limit:
        raise ArtifactError(f"{name} has more than {limit} bytes, the limit")
    return content


def _check_similarity(manifest: Manifest) -> None:
    allowed = SIMILARITIES.get(manifest.outputs[0], (None,))
    if manifest.similarity not in allowed:
        names = ", ".join("null" if name is None else name for name in allowed)
        raise ValueError(
            f"similarity is {manifest.similarity!r}; allowed with its outputs: {names}"
        )


def _regular_files(folder: Path) -> Iterator[str]:
    """Yield the path of each file in `folder` and its subfolders, relative to it.

    Raises:
        ArtifactError: One is a symbolic link or not regular, or a folder cannot be read.
    """
    unread = [""]
    while unread:
        parent = unread.pop()
        try:
            with os.scandir(folder / parent) as scan:
                entries = list(scan)
        except OSError as error:
            raise ArtifactError(
                f"{parent or '.'} in the artifact {folder.name} cannot be read: {error.strerror}"
            ) from error
        for entry in entries:
            name = os.path.join(parent, entry.name)
            if entry.is_dir(follow_symlinks=False):
                unread.append(name)
            elif entry.is_file(follow_symlinks=False):
                yield name
            else:
                kind = "a symbolic link" if entry.is_symlink() else "not a regular file"
                raise ArtifactError(f"{name} in the artifact {folder.name} is {kind}")


def _open_regular(folder: Path, name: str) -> BufferedReader:
    """Open a regular file, without following symbolic links."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactError(f"{name} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArtifactError(f"{name} is not a regular file")
    return open(descriptor, "rb")
