"""Capabilities of the gradient routes."""

import re
from itertools import chain
from pathlib import Path
from typing import get_args

import pytest

from models.artifact import Artifact
from models.gradients import inputs
from models.gradients.inputs import Method
from service.debug.target import TARGETS
from tests.service.debug.conftest import service_of


@pytest.mark.slow
def test_capabilities_list_every_accepted_value(small_artifact: Artifact) -> None:
    with service_of(small_artifact) as client:  # a new one starts the gradient process
        capabilities = client.get("/debug/capabilities").json()
    assert capabilities["layers"] == [
        "words",
        "embeddings",
        "layers.0",
        "output",
    ]
    assert capabilities["norms"][:2] == ["embeddings.norm", "layers.0.norm1"]
    assert capabilities["methods"] == list(get_args(Method))
    assert capabilities["objectives"] == list(get_args(inputs.ObjectiveName))
    assert "large_mean" in capabilities["distributions"]
    assert capabilities["targets"] == list(TARGETS["embedding"])
    assert capabilities["baselines"] == ["pad", "mask", "zero"]
    assert capabilities["of"] == ["both"]
    assert (capabilities["device"], capabilities["op"]) == (
        "cpu",
        {"forward": "cpp", "backward": "cpp"},
    )


def test_page_offers_every_target() -> None:
    page = Path("service/page/static")
    (options,) = re.findall(
        r'name="target">(.*?)</select>', (page / "index.html").read_text(), re.S
    )
    (requests,) = re.findall(
        r"TARGETS = {(.*?)^};", (page / "questions.js").read_text(), re.S | re.M
    )
    targets = list(chain(*TARGETS.values()))
    assert re.findall(r'<option value="(\w+)"', options) == targets
    assert sorted(re.findall(r"^  (\w+): ", requests, re.M)) == sorted(targets)
