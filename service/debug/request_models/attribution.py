"""Request bodies of /debug/attribute, /debug/attribute/pair and /debug/vjp."""

from pydantic import Field

from models.gradients.inputs import BaselineName, Method, Reduction, UnitKind
from service.debug.request_models.base import ModelRequest, Text, Vector
from service.debug.request_models.targets import Target


class AttributeRequest(ModelRequest):
    """Attribution of a scalar to the tokens and words of a text, or of a pair of texts."""

    text: Text
    text_pair: str | None = Field(
        None,
        description="Second text: the document of a query, or the text that a reranker or "
        "classifier reads together with `text`; null: `text` alone",
    )
    target: Target = Field(
        description="Scalar to attribute; /debug/capabilities lists those of the model"
    )
    method: Method = "integrated_gradients"
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer whose tokens are scored; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "pad",
        description="Baseline of integrated gradients and occlusion: padding tokens, mask tokens "
        "or zero vectors",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Tolerance of integrated gradients: the maximum error of the sum of the "
        "scores, relative to the scalar's change from baseline to text, and the maximum error of "
        "each score, relative to the largest score",
    )
    max_evaluations: int = Field(
        256,
        ge=17,
        le=4096,
        description="Maximum number of evaluations of the model for integrated gradients",
    )
    samples: int = Field(25, ge=1, le=1024, description="Number of noisy copies in SmoothGrad")
    sigma: float = Field(
        0.1,
        ge=0,
        le=10,
        description="Standard deviation of SmoothGrad's noise, relative to the root mean square of "
        "the token vectors",
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of SmoothGrad, and of the random orders in `faithfulness`",
    )
    faithfulness: UnitKind | None = Field(
        None,
        description="Units whose removal measures the faithfulness of the scores; null: it is not "
        "measured",
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class PairRequest(ModelRequest):
    """Attribution of the similarity of texts `a` and `b` to pairs of their tokens."""

    a: Text
    b: Text
    layer: str = Field(
        "output",
        max_length=64,
        description="Layer of the paired token vectors; /debug/capabilities lists all layers",
    )
    baseline: BaselineName = Field(
        "zero",
        description="Baseline of the tokens: padding tokens, mask tokens or zero vectors",
    )
    tolerance: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Tolerance of each text's path integral: the maximum error of the sum over "
        "tokens, relative to the vector's change from baseline to text, and the maximum error of "
        "each token's contribution, relative to the largest contribution",
    )
    max_evaluations: int = Field(
        128, ge=17, le=4096, description="Maximum number of evaluations of the model per text"
    )
    dry_run: bool = Field(False, description="Return only the cost, without running the method")


class VjpRequest(ModelRequest):
    """Backpropagation of a gradient from the served vector to the token vectors at a layer."""

    text: Text
    cotangent: Vector = Field(description="Gradient with respect to the served vector")
    layer: str = Field(
        "words",
        max_length=64,
        description="Layer of the token vectors; /debug/capabilities lists all layers",
    )
    reduce: Reduction = Field(
        "norm",
        description="Reduction of each token's gradient: its Euclidean norm (`norm`), its dot "
        "product with the token vector (`dot`), or no reduction (`full`)",
    )
