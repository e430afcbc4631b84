"""The artifact: the directory written by export and read by the service. Standard library only.

    manifest.json     description of the artifact, with the SHA-256 of every other file
    model.onnx        graph for onnxruntime on CPUs; model.openvino.onnx for OpenVINO
    model.weights     weights of both; engines map this file into memory
    tokenizer.json    tokenizer, without truncation and padding
    check.json        inputs of the self-check, their token ids, and PyTorch's vectors for them
    query_weights.npy weights of queries, of a sparse model that only looks them up (optional)
    calibration.json  ranges of the vectors' dimensions, for quantised vectors (optional)
    source/           weights and config of the reference model, for gradients (optional)

With `--target cuda` there are model.cuda.onnx and model.cuda.weights as well, and with
`--precision int8` model.int8.onnx and model.int8.weights, for OpenVINO.

An artifact is written to a temporary directory, which is renamed when complete. Each file is
hashed, and rejected if it is a symbolic link or its SHA-256 differs from the manifest's. Engines
keep the weights mapped: files of an artifact in use must not be changed in place.
"""

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal

FORMAT = 8
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
CHECK = "check.json"
QUERY_WEIGHTS = "query_weights.npy"
CALIBRATION = "calibration.json"
SOURCE = "source"

# Names of the outputs of graphs. From "weights", one weight per token, the service computes sparse
# vectors.
Output = Literal["pooled", "tokens", "logits", "sparse", "weights", "tags", "multi"]

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
    min_tokens: int
    max_tokens: int
    texts: int
    measures: Mapping[str, float]


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
    calibration_texts: int
    evaluated_texts: int
    measures: Mapping[str, float]
    by_length: tuple[LengthQuality, ...]
    check: Mapping[Output, Mapping[str, float]]
    costs: Mapping[str, float]
    float_layers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One ONNX file of an artifact.

    Attributes:
        file: File name in the directory.
        weights: Name of the file with the graph's weights, in the same directory.
        engine: Name of the engine that runs the graph, in `models.engines.ENGINES`.
        dtype: Dtype of the weights, "float32", "float16" or "int8".
        opset: Opset version of the default ONNX domain.
        parity: Worst agreement with PyTorch, measured at export: the fields `worst_cosine`,
            `worst_norm` and `max_abs` of `models.export.parity.Parity`. None if the engine was
            not usable, and for int8.
        quality: Quality measured at export, for int8; else None.
    """

    file: str
    weights: str
    engine: str
    dtype: str
    opset: int
    parity: Mapping[str, float] | None
    quality: Quality | None = None


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """Rules for the tokens of one kind of text: queries, documents or others.

    Only models with a vector or a weight per token, or with looked-up queries, have rules.

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
    """

    max_tokens: int
    looks_up: bool = False
    min_tokens: int = 0
    filler: int = 0
    attends_to_filler: bool = True
    skipped: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    first: int = 0
    unweighted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Description of an artifact.

    Attributes:
        name: Name of the model in responses.
        source: Origin of the checkpoint: a folder name, a package or a hub id.
        revision: Commit of a hub model or version of a package; None for a folder.
        family: `model_type` in the checkpoint's config.json.
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
        matryoshka_dimensions: Widths of truncated row vectors that the model was trained for.
        truncation_side: Side on which inputs with too many tokens are truncated, "left" or "right".
        prompts: Texts that can be prepended to an input, by prompt name.
        default_prompt: Name of the default prompt; None: no prompt.
        adapters: Names of the adapters, in the order of their indices. An adapter applies to inputs
            with the prompt of the same name.
        token_rules: Rules for tokens by prompt name, "query" or "document"; the name "" stands for
            all others. Empty for models with one vector per text, all from the graph.
        graphs: Descriptions of the ONNX files.
        files: SHA-256 of every file except the manifest, by path relative to the artifact.
        versions: Versions of the libraries used for the export, by library name.
    """

    name: str
    source: str
    revision: str | None
    family: str
    weights_sha256: Mapping[str, str]
    outputs: tuple[Output, ...]
    labels: tuple[str, ...]
    activation: str
    width: int
    hidden_size: int
    windows: tuple[int | None, ...]
    vocab_size: int
    max_tokens: int
    pooling: tuple[str, ...]
    heads: tuple[str, ...]
    include_prompt: bool
    normalize: bool
    matryoshka_dimensions: tuple[int, ...]
    truncation_side: str
    prompts: Mapping[str, str]
    default_prompt: str | None
    adapters: tuple[str, ...]
    token_rules: Mapping[str, TokenRules]
    graphs: tuple[Graph, ...]
    files: Mapping[str, str]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class Check:
    """Inputs of the self-check and their reference vectors, computed by PyTorch in float32.

    Attributes:
        rows: Token ids of each input.
        outputs: Reference vectors, by output name. "tokens" and "multi" have the vectors of
            the first few inputs, "tags" and "weights" those of all, one per token and concatenated.
            The others have one vector per input.
        texts: Text of each input; empty for a classifier, whose inputs include pairs of texts.
        adapters: Index of each input's adapter, or `models.packing.NO_ADAPTER`.
        token_types: Type of each token of each input; empty: all have type 0.
        unattended: Number of last tokens of each input that no token attends to.
    """

    rows: list[list[int]]
    outputs: dict[str, list[list[float]]]
    texts: list[str]
    adapters: list[int]
    token_types: list[list[int]]
    unattended: list[int]


@dataclass(frozen=True)
class Artifact:
    """A directory with exactly the files listed in its manifest."""

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> "Artifact":
        """Return the artifact in the directory `path`.

        File contents are verified later, by `read` and `verify`.

        Raises:
            ArtifactError: The directory has no manifest, the manifest is invalid or has an
                unsupported format version, or the other files differ from those that it lists.
        """
        if not (path / MANIFEST).is_file():
            raise ArtifactError(f"{path} is not an artifact: it has no {MANIFEST}")
        with _open_regular(path, MANIFEST) as stream:
            manifest = _parse(stream.read())
        present = {
            str(file.relative_to(path)) for file in path.rglob("*") if not _is_directory(file)
        }
        listed = {MANIFEST, *manifest.files}
        for problem, names in (("lacks", listed - present), ("has an unlisted", present - listed)):
            if names:
                raise ArtifactError(f"the artifact {path.name} {problem} file {min(names)}")
        return cls(path, manifest)

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
            content = stream.read()
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
        """Return the inputs and reference vectors of the self-check.

        Raises:
            ArtifactError: check.json cannot be read, is invalid, or differs from the exported file.
        """
        try:
            return Check(**json.loads(self.read(CHECK)))
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{CHECK} is invalid: {error}") from error


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
        values: dict[str, Any] = json.loads(content)
        if (version := values.pop("format", None)) != FORMAT:
            raise ArtifactError(
                f"{MANIFEST} has format {version!r}; format {FORMAT} is required: export again"
            )
        values["graphs"] = tuple(map(_parse_graph, values["graphs"]))
        values["pooling"] = tuple(values["pooling"])
        values["heads"] = tuple(values["heads"])
        values["outputs"] = tuple(values["outputs"])
        values["labels"] = tuple(values["labels"])
        values["windows"] = tuple(values["windows"])
        values["matryoshka_dimensions"] = tuple(values["matryoshka_dimensions"])
        values["adapters"] = tuple(values["adapters"])
        rules = values["token_rules"].items()
        values["token_rules"] = {name: _parse_rules(fields) for name, fields in rules}
        values["files"] = dict(values["files"])
        return Manifest(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        names = ", ".join(entry.name for entry in fields(Manifest))
        raise ArtifactError(
            f"{MANIFEST} is invalid ({error}); required fields: format, {names}"
        ) from error


def _parse_rules(values: dict[str, Any]) -> TokenRules:
    ids = {name: tuple(values[name]) for name in ("skipped", "kept", "unweighted")}
    return TokenRules(**{**values, **ids})


def _is_directory(file: Path) -> bool:
    return stat.S_ISDIR(file.lstat().st_mode)


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


def _parse_graph(values: dict[str, Any]) -> Graph:
    quality = values.pop("quality", None)
    if quality is not None:
        quality["float_layers"] = tuple(quality["float_layers"])
        quality["by_length"] = tuple(LengthQuality(**own) for own in quality["by_length"])
        quality = Quality(**quality)
    return Graph(**values, quality=quality)
