"""Names of models."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from service.inference.registry.model_names import MAX_CHARS, check_name, name_problem
from service.inference.results.metrics import InferenceMetrics, ModelMetrics


@pytest.mark.parametrize(
    "name",
    ["a", "org/model", "sentence-transformers/all-MiniLM-L6-v2", "two words", "模型", "é" * 256],
)
def test_ordinary_names_are_valid(name: str) -> None:
    assert name_problem(name) is None
    check_name(name)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("", "''"),
        (" a", "' a'"),
        ("a ", "'a '"),
        ("a\nCRITICAL b", r"'a\nCRITICAL b'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("\x9b31m", r"'\x9b31m'"),
        ("a\u2028b", r"'a\u2028b'"),
        ("a\u202eb", r"'a\u202eb'"),
        ("a\u200bb", r"'a\u200bb'"),
        ("\udcff\udcfe", r"'\udcff\udcfe'"),
        ("a" * (MAX_CHARS + 1), f"'{'a' * MAX_CHARS}...'"),
    ],
)
def test_invalid_names_are_shown_with_escapes(name: str, shown: str) -> None:
    assert name_problem(name) is not None
    with pytest.raises(ValueError, match=re.escape(f"the name {shown} of a model must")) as caught:
        check_name(name)
    assert str(caught.value).isprintable()


@given(st.text(st.characters(), max_size=300))
def test_valid_names_are_labels_of_metrics_on_one_line(name: str) -> None:
    if name_problem(name) is not None:
        return
    registry = CollectorRegistry()
    ModelMetrics(InferenceMetrics(registry, longest_s=1.0), name)
    text = generate_latest(registry).decode()
    lines = [line for line in text.split("\n") if line.startswith("vitrine_queue_tokens{")]
    assert len(lines) == 1
    assert lines[0].isprintable()
