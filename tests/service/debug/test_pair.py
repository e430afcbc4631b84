"""Attribution of a similarity to pairs of tokens."""

import numpy as np
import pytest
from starlette.testclient import TestClient

from tests.service.debug.conftest import CAT, FELINE, ask, vector


def test_pair_matrix_adds_up_to_the_cosine_of_the_served_vectors(client: TestClient) -> None:
    result = ask(client, "attribute/pair", a=CAT, b=FELINE)
    cosine = vector(client, CAT) @ vector(client, FELINE)
    matrix = np.array(result["matrix"])
    assert matrix.shape == (len(result["tokens_a"]), len(result["tokens_b"]))
    assert matrix.sum() == pytest.approx(cosine, abs=1e-5)
    assert result["similarity"] == pytest.approx(cosine, abs=1e-6)
    pad = ask(client, "attribute/pair", a=CAT, b=FELINE, baseline="pad")
    terms = pad["reference_terms"]
    whole = pad["sum"] + terms["a_baseline"] + terms["baseline_b"] - terms["baselines"]
    assert whole == pytest.approx(cosine, abs=1e-5)
    assert all(side["converged"] for side in pad["completeness"])


@pytest.mark.slow
def test_pair_matrix_of_long_texts_has_every_token(client: TestClient) -> None:
    result = ask(client, "attribute/pair", a=f"{CAT} " * 20, b=f"{FELINE} " * 20)
    assert np.array(result["matrix"]).shape == (142, 162)
    assert abs(result["delta"]) < 1e-5
