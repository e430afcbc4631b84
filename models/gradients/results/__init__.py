"""Results of the gradient methods. This package does not import torch.

The methods return these dataclasses, and the gradient process sends them as JSON. The service
derives its response models from them, so a field or property added here appears in the API and in
its documentation. In JSON, non-finite numbers are null.
"""

from models.gradients.results.attribution import (
    AlignedTokens,
    Attribution,
    Completeness,
    Faithfulness,
    FaithfulnessPoint,
    PairAttribution,
    ReferenceTerms,
    RemovalEffect,
    TokenGradient,
    UnitRemoval,
)
from models.gradients.results.flow import (
    Flow,
    FlowStep,
    FlowVerdict,
    ForwardSizes,
    GradientSizes,
    NonFiniteStep,
    ParameterGradient,
    Role,
)
from models.gradients.results.json_form import (
    Matrix,
    Phase,
    Vector,
    as_dict,
    properties,
)
from models.gradients.results.layer_norm import (
    Comparison,
    ImplementationVerdict,
    Invariant,
    LayerNormCheck,
    NormStep,
)
from models.gradients.results.parity import (
    FileHash,
    LayerDifference,
    ParityCheck,
    StressRow,
    TokenIds,
    VectorDifference,
    WeightDifference,
)
from models.gradients.results.patching import (
    Patching,
    TapPatch,
)

__all__ = [
    "AlignedTokens",
    "Attribution",
    "Comparison",
    "Completeness",
    "Faithfulness",
    "FaithfulnessPoint",
    "FileHash",
    "Flow",
    "FlowStep",
    "FlowVerdict",
    "ForwardSizes",
    "GradientSizes",
    "ImplementationVerdict",
    "Invariant",
    "LayerDifference",
    "LayerNormCheck",
    "Matrix",
    "NonFiniteStep",
    "NormStep",
    "PairAttribution",
    "ParameterGradient",
    "ParityCheck",
    "Patching",
    "Phase",
    "ReferenceTerms",
    "RemovalEffect",
    "Role",
    "StressRow",
    "TapPatch",
    "TokenGradient",
    "TokenIds",
    "UnitRemoval",
    "Vector",
    "VectorDifference",
    "WeightDifference",
    "as_dict",
    "properties",
]
