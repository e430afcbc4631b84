"""Pydantic models of the routes about the served models."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from models.engines import Precision
from models.manifest import SimilarityName, TextSource
from service.api.strict_model import StrictModel
from service.evaluation.gate import MeasureChange

_SIMILARITY = (
    "Similarity of the model's vectors, by which `/score` and `/rerank` compare them: `cosine`; "
    "`dot`, the dot product; `euclidean` or `manhattan`, the negative distance; `maxsim` of "
    "multi-vectors; null: the model has no vectors"
)
_Outputs = Annotated[
    list[str],
    Field(
        description="Outputs of the model: `pooled` and `tokens` for an embedding model, `sparse` "
        "for a model of sparse vectors, `multi` for a multi-vector model, several of these for a "
        "model like BGE-M3, `logits` for a sequence classification model, "
        "`tags` for a token classification model, `spans` for a model "
        "like GLiNER, whose labels are those of a request"
    ),
]
_Labels = Annotated[
    list[str],
    Field(
        description="Labels of a sequence or token classification model, in the order of its logits"
    ),
]


class Limits(BaseModel):
    """Limits of a request and its inputs."""

    max_inputs: int
    max_chars: int
    max_token_vectors: int
    max_body_bytes: int
    max_tokens: int


class AgreementInfo(BaseModel):
    """Worst differences between the engine's vectors and the artifact's reference vectors."""

    cosine: float = Field(description="Lowest cosine similarity between a vector and its reference")
    norm: float = Field(
        description="Largest difference between the L2 norms of a vector and its reference, "
        "relative to the norm of the reference"
    )


class CalibrationInfo(BaseModel):
    """Calibration of the model for `output_dtype` int8 and uint8, and the quality of all dtypes."""

    widths: list[int] = Field(
        description="Numbers of dimensions with ranges; vectors that are not normalised after "
        "their truncation can have any number"
    )
    texts: int = Field(description="Number of texts from which the ranges were computed")
    evaluated_texts: int = Field(description="Number of other texts, for `recall_at_10`")
    recall_at_10: dict[str, float] = Field(
        description="Share of the 10 nearest texts by cosines of float32 vectors that are found by "
        "dequantised int8 vectors (`int8`), by the 40 nearest `ubinary` vectors rescored with "
        "their bits (`ubinary`), and by these 40 rescored with dequantised int8 vectors "
        "(`ubinary_int8`); queries are float32"
    )


class CalibrationRanges(BaseModel):
    """Ranges with which clients dequantise int8 and uint8 vectors.

    The value of a code from 0 to 255 (int8: code + 128) is minimum + code * (maximum - minimum) /
    255.
    """

    model: str
    ranges: dict[int, tuple[list[float], list[float]]] = Field(
        description="Minimum and maximum of each dimension, by number of dimensions"
    )


class LengthQualityInfo(BaseModel):
    """Quality of an int8 graph for texts of a class of lengths."""

    model_config = ConfigDict(from_attributes=True)

    source: TextSource = Field(
        description="`own` for the texts of --calibrate, `joined` if each is several of them, or "
        "`generated` from the vocabulary"
    )
    min_tokens: int = Field(description="Length of the shortest texts, in tokens")
    max_tokens: int = Field(description="Length of the longest texts, in tokens")
    texts: int = Field(description="Number of texts")
    measures: dict[str, float] = Field(description="Measured quality, as in `measures` of all")


class QualityInfo(BaseModel):
    """Quality of an int8 graph relative to float32, measured at export."""

    model_config = ConfigDict(from_attributes=True)

    measures: dict[str, float] = Field(
        description="`mean_cosine`, `worst_cosine` and `recall_at_10` of pooled vectors, or "
        "`rank_correlation` or `label_agreement` of logits: the lowest of all lengths"
    )
    by_length: list[LengthQualityInfo] = Field(description="Measured quality by length of texts")
    is_generated: bool = Field(
        description="Whether all texts were generated from the vocabulary, without --calibrate"
    )
    calibration_texts: int = Field(description="Number of texts that calibrated the graph")
    evaluated_texts: int = Field(description="Number of other texts, which measured the quality")
    float_layers: list[str] = Field(description="Layers that stay in float")


class SpaceDescription(BaseModel):
    """Space of another model, into which vectors of queries can be mapped."""

    model: str = Field(description="Name of the other model")
    version: str = Field(description="Identity of the other model")
    similarity: SimilarityName = Field(description="Similarity of its vectors")
    dimensions: int = Field(description="Width of its vectors")
    prompt_name: str | None = Field(
        description="Prompt of queries with `space` and no `prompt_name`, with which the map was "
        "measured; null: the default prompt"
    )
    form: str = Field(description="How the map was fitted")
    pairs: int = Field(description="Number of texts with which it was fitted")
    queries: int = Field(description="Number of other queries with which it was measured")
    measures: dict[str, float] = Field(
        description="Results by name; `recall_ratio` is relative to full re-embedding"
    )
    sha256: str = Field(description="SHA-256 of the map; responses have its start")


class ServiceInfo(BaseModel):
    """The served model and its engine."""

    model: str
    source: str
    revision: str | None
    license: str | None = Field(
        description="License of the checkpoint, as its model card or config states it; null: "
        "neither does"
    )
    family: str
    outputs: _Outputs
    labels: _Labels
    activation: str | None = Field(
        description="Activation that turns the logits of a sequence classification model into "
        "scores, `sigmoid`, `softmax` or `identity`; null: other models"
    )
    dimensions: int | None = Field(
        description="Width of a pooled vector or multi-vector; null: the model has neither"
    )
    pooling: list[str]
    normalize: bool
    similarity: SimilarityName | None = Field(description=_SIMILARITY)
    matryoshka_dimensions: list[int] = Field(
        description="Values of `dimensions` that the model was trained for"
    )
    calibration: CalibrationInfo | None = Field(
        description="Calibration of quantised vectors; null: exported without --calibrate"
    )
    spaces: dict[str, SpaceDescription] = Field(
        description="Spaces of other models by name, for `space` of `/encode`"
    )
    truncation_side: Literal["left", "right"] = Field(
        description="Side from which tokens are dropped if an input exceeds the model's maximum "
        "length"
    )
    prompts: list[str]
    default_prompt: str | None
    instruction: str | None = Field(
        description="Instruction that a reranker with a template of pairs has without a prompt or "
        "an `instruction` of the request; null: it has none then, or never"
    )
    max_tokens_by_prompt: dict[str, int] = Field(
        description="Maximum length in tokens, by prompt name, where a model has one for queries "
        "or documents"
    )
    looked_up_prompts: list[str] = Field(
        description="Prompts of an inference-free sparse model whose texts have the weights of "
        'their tokens in a table, without the engine; "" stands for texts that are neither queries '
        "nor documents"
    )
    adapters: list[str] = Field(
        description="Names of the model's adapters; each is selected by the prompt of the same name"
    )
    weights_sha256: dict[str, str]
    versions: dict[str, str] = Field(
        description="Versions of the programs that exported the artifact"
    )
    signature: str | None = Field(
        description="SHA-256 of the PEM public key that verified the artifact's signature; null: "
        "the setting `models.verify` requires none"
    )
    identity: str = Field(
        description="SHA-256 of everything that determines results: settings of the artifact, its "
        "files, engine and precision; X-Model-Version is its start"
    )
    graph_sha256: str
    tokenizer_sha256: str
    engine: str
    precision: str
    quality: QualityInfo | None = Field(
        description="Quality of the int8 graph; null: another precision"
    )
    threads: int
    self_check: dict[str, AgreementInfo] = Field(
        description="Agreement of the engine's vectors with the artifact's reference vectors, by "
        "output"
    )
    limits: Limits
    version: str


class ModelSummary(BaseModel):
    """A served model."""

    name: str
    aliases: list[str]
    default: bool = Field(description="Whether requests that name no model are for this model")
    loaded: bool = Field(
        description="Whether the model is in memory; otherwise the next request for it loads it"
    )
    outputs: _Outputs
    labels: _Labels
    similarity: SimilarityName | None = Field(description=_SIMILARITY)
    version: str | None = Field(
        description="Start of `identity` in the description of the model; null: not loaded"
    )
    weight_bytes: int = Field(description="Size of the file of weights")


class ModelList(BaseModel):
    """The served models, ordered by name."""

    models: list[ModelSummary]


class EvalCondition(StrictModel):
    """An evaluation that the new version must have passed."""

    folder: str = Field(
        min_length=1,  # as a path, "" would be the working directory
        description="Output of `vitrine eval --against` of the new version, in place of the served "
        "one, on the machine of the service",
    )
    measure: str = Field(
        "nDCG@10", max_length=32, description="Measure of the evaluation that must not drop"
    )
    max_drop: float = Field(
        0.0,
        ge=-1,
        le=1,
        description="By how much the measure may be lower; below 0: by how much it must be higher",
    )


Alias = Annotated[str, Field(min_length=1, max_length=256)]


class LoadRequest(StrictModel):
    """An artifact to serve."""

    path: str = Field(
        min_length=1,  # as a path, "" would be the working directory
        description="Folder of an artifact written by vitrine-export, on the machine of the "
        "service",
    )
    allow_incompatible: bool = Field(
        False,
        description="Whether the new version may differ from the served one in what clients rely "
        "on: outputs, width, similarity, labels, and the activation of their scores",
    )
    aliases: Annotated[list[Alias], Field(fail_fast=True)] | None = Field(
        None, description="Other names of the model in requests; null: those of the served version"
    )
    precision: Precision | None = Field(
        None,
        description="Precision of the engine; null: that of the served version, or of the setting "
        "`engine.precision`",
    )
    share: float | None = Field(
        None,
        gt=0,
        description="Weight in the division of the device's time among busy models; null: that of "
        "the served version, or 1",
    )
    texts: list[str] = Field(
        [],
        max_length=256,
        description="Texts for which the results of the old and the new version are compared",
    )
    min_cosine: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="Lowest cosine similarity between the results of both versions with which the "
        "new version is served",
    )
    eval: EvalCondition | None = Field(
        None, description="Evaluation that the new version must have passed; null: none"
    )


class LoadedVersion(BaseModel):
    """A version of a model."""

    version: str
    path: Path


class LoadResponse(BaseModel):
    """The version that is served now."""

    model: str
    version: str
    previous: LoadedVersion | None = Field(
        description="Version that was served before; its path in another request brings it back; "
        "null: the model was not loaded"
    )
    shadow: AgreementInfo | None = Field(
        description="Worst agreement of the results of both versions; null: without `texts`"
    )
    eval: MeasureChange | None = Field(
        description="The measure of both versions; null: without `eval`"
    )
