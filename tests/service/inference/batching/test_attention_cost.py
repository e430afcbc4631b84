import pytest
import torch

from models.export.checkpoint import load
from service.inference.batching.attention_cost import AttentionCost
from tests.conftest import FamilyArtifact


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "modernbert", "gemma3_text", "albert"])
def test_cost_counts_the_pairs_of_tokens_that_attend_to_each_other(
    family: str, family_artifact: FamilyArtifact
) -> None:
    artifact = family_artifact(family)
    cost = AttentionCost(artifact.manifest.windows, artifact.manifest.hidden_size, 0.0)
    config = load(artifact.path / "source")[0].encoder.config
    for length in (1, 5, 2000):
        excluded = [layer.reach.excludes(length, torch.device("cpu")) for layer in config.attention]
        shares = [1.0 if mask is None else 1 - mask.double().mean().item() for mask in excluded]
        share = sum(shares) / len(shares) if shares else 1.0
        # Rows are cut off at their ends, where windows are narrower.
        assert cost(length) == pytest.approx(share * length**2 / config.d_model, rel=0.01)
