"""Targets as functions of the vectors of the reference model, and the rows of their jobs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from torch import Tensor

from models.gradients import attribution
from models.gradients.attribution import TargetFunction
from models.gradients.inputs import InputRow
from models.gradients.maxsim import maxsim
from models.gradients.reference_model import ReferenceModel
from service.debug.attribute import AttributeJob
from service.debug.patch import PatchJob
from service.debug.target import (
    CosineTarget,
    DimTarget,
    DotTarget,
    LabelTarget,
    MarginTarget,
    MaxSimTarget,
    NormTarget,
    ResolvedTarget,
    ScoreTarget,
    SimilarityTarget,
    SparseTarget,
)


def target_function(  # noqa: C901 - one case per target
    model: ReferenceModel, resolved: ResolvedTarget
) -> TargetFunction:
    """Return the target of a job as a function of the vectors of each row."""
    normalize = model.normalize
    similarity = model.similarity or "cosine"  # other models do not have the targets that take it

    def vector(index: int) -> Tensor:
        return model.vector(resolved.rows[index])

    match resolved.target:
        case CosineTarget():
            return attribution.cosine(vector(0))
        case SimilarityTarget():
            return attribution.similarity(similarity, vector(0), normalize)
        case MarginTarget():
            return attribution.margin(similarity, vector(0), vector(1), normalize)
        case DotTarget(vector=other):
            weight = model.network.encoder.embeddings.word.weight
            return attribution.dot(weight.new_tensor(other), normalize)
        case DimTarget(index=index):
            return attribution.dim(index, normalize)
        case NormTarget():
            return attribution.norm()
        case ScoreTarget():
            return attribution.score()
        case LabelTarget():
            return attribution.label(*resolved.indices)
        case SparseTarget():  # the only entry that the job computes
            return attribution.dim(0, normalize=False)
        case MaxSimTarget():
            return maxsim(normalize)
    assert_never(resolved.target)


def rows_of(job: AttributeJob | PatchJob) -> Sequence[InputRow]:
    """Return the rows of a job, of which a sparse target needs one vocabulary entry alone."""
    if not isinstance(job.target.target, SparseTarget):
        return job.rows
    return [replace(row, entries=job.target.indices) for row in job.rows]
