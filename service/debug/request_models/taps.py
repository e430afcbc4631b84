"""Request bodies of /debug/activations and /debug/patch."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from models.gradients.inputs import TokenReduction
from service.debug.request_models.base import Input, ModelRequest, Text, by_type
from service.debug.request_models.targets import Target

TensorFormat = Literal["safetensors", "npz"]
TapNames = Annotated[
    list[Annotated[str, Field(max_length=64)]],
    Field(
        min_length=1,
        max_length=1024,
        description="Names of steps of the forward pass, or of layers, whose output is that of "
        "their last step; /debug/capabilities lists both as `taps` and `layers`",
    ),
]


class ActivationsRequest(ModelRequest):
    """Outputs of steps of the forward pass, as a file of tensors."""

    texts: Annotated[list[Input], Field(min_length=1, max_length=64)]
    taps: TapNames
    reduction: TokenReduction = Field(
        "none",
        description="Reduction over the tokens of a text: their mean, the norm of each, the first "
        "or the last one. Outputs with one vector per text stay as they are, except for `norm`",
    )
    format: TensorFormat = "safetensors"
    dry_run: bool = Field(
        False, description="Return only the cost and the size of the tensors in bytes"
    )


PairOfPositions = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
Positions = (
    Annotated[
        Annotated[Literal["each"], Tag("each")]
        | Annotated[list[PairOfPositions], Field(min_length=1, max_length=4096), Tag("pairs")],
        by_type({str: "each", list: "pairs"}, "'each', a list of pairs of positions, or null"),
    ]
    | None
)


class PatchRequest(ModelRequest):
    """Replacement of token vectors of a text by those of another one, the source."""

    text: Text
    text_pair: str | None = Field(None, description="As in /debug/attribute")
    source: Text = Field(description="Text in place of `text`, from which the token vectors are")
    source_pair: str | None = Field(
        None, description="Text in place of `text_pair`; null: `text_pair`"
    )
    target: Target = Field(
        description="Scalar to compute; /debug/capabilities lists those of the model"
    )
    taps: TapNames
    positions: Positions = Field(
        None,
        description="Replaced tokens. Null: all at once, if both texts have as many tokens. "
        "`each`: each one alone, likewise. A list of pairs: all of these at once; a pair is an "
        "index in `tokens`, and one in `source_tokens`",
    )
    dry_run: bool = Field(False, description="Return only the cost")
