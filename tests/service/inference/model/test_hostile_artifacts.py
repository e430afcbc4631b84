"""Artifacts of unknown origin, with right hashes: each is refused with its fault, or harmless."""

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from models import engines
from models.artifact import Artifact
from models.engines import EngineError
from models.manifest import MANIFEST, QUERY_WEIGHTS, TOKENIZER, ArtifactError
from service.inference.model import opening
from service.inference.model.opening import ModelOptions, open_model
from service.inference.results.query_table import read_query_weights
from tests.hostile_artifacts import (
    add_rules,
    copy_of,
    edit,
    edit_graph,
    make_hostile,
    make_slow,
    outcome_of,
    rename_output,
    replace,
)

WAIT_S = 60
CPU_GRAPHS = {"onnxruntime": "model.onnx", "openvino": "model.openvino.onnx"}
PADDING: dict[str, Any] = {
    "strategy": {"Fixed": 20_000},
    "direction": "Right",
    "pad_to_multiple_of": None,
}
PADDING |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE: dict[str, Any] = {"type": "TemplateProcessing", "special_tokens": {}}
TEMPLATE |= {"single": [SEQUENCE], "pair": [SEQUENCE] * 2}
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}


@pytest.fixture
def folder(calibrated_artifact: Artifact, tmp_path: Path) -> Path:
    """A copy of the calibrated artifact, whose files may be replaced."""
    return copy_of(calibrated_artifact.path, tmp_path / "copy")


@pytest.mark.parametrize("start", range(0, 120, 30))
async def test_any_values_are_refused_by_name_or_harmless(
    calibrated_artifact: Artifact, tmp_path: Path, start: int
) -> None:
    outcomes = set()
    for seed in range(start, start + 30):
        folder = copy_of(calibrated_artifact.path, tmp_path / str(seed))
        add_rules(folder)
        make_hostile(folder, random.Random(seed))  # noqa: S311
        outcomes.add(await outcome_of(folder))
        shutil.rmtree(folder)
    assert "ArtifactError" in outcomes
    assert "encoded encoded" in outcomes


def moved(model: onnx.ModelProto) -> None:
    tensor = next(
        own for own in model.graph.initializer if own.data_location == TensorProto.EXTERNAL
    )
    (entry,) = (own for own in tensor.external_data if own.key == "location")
    entry.value = "../model.weights"


def negated(model: onnx.ModelProto) -> None:
    output = rename_output(model, "result")
    model.graph.node.append(helper.make_node("Neg", ["result"], [output]))


def summed(model: onnx.ModelProto) -> None:
    """Make the first output narrower: (B, 1), which arrays of other widths broadcast with."""
    output = rename_output(model, "result")
    axes = numpy_helper.from_array(np.array([1]), "axes")
    model.graph.initializer.append(axes)
    model.graph.node.append(helper.make_node("ReduceSum", ["result", "axes"], [output]))
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1


def without_output(model: onnx.ModelProto) -> None:
    del model.graph.output[0]


def with_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, []))


def misnamed(model: onnx.ModelProto) -> None:
    model.graph.node[0].op_type = "NoSuchOperator"


@pytest.mark.parametrize("engine", CPU_GRAPHS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (moved, "{file} has weights in ../model.weights; .* model.weights"),
        (negated, "self-check failed: .* cosine"),
        (summed, r"self-check failed: the output 'pooled' has the shape \(\d+, 1\)"),
        (without_output, "self-check failed: the graph of {engine} cannot compute .* 'pooled'"),
        (with_input, "the graph has an unknown input: rows"),
        (misnamed, "{engine} cannot open {file}: .*NoSuchOperator"),
    ],
)
async def test_faulty_graph_is_refused(
    folder: Path, engine: str, change: Callable[[onnx.ModelProto], object], message: str
) -> None:
    edit_graph(folder, CPU_GRAPHS[engine], change)
    expected = message.format(file=CPU_GRAPHS[engine], engine=engine)
    with pytest.raises((ArtifactError, EngineError), match=expected) as caught:
        await open_model(folder, ModelOptions(engine=engine, threads=1))
    assert str(caught.value).isprintable()


async def test_path_that_onnxruntime_cannot_open_is_refused_in_a_sentence(folder: Path) -> None:
    path = folder.with_name(os.fsdecode(b"\xe9"))
    shutil.copytree(folder, path)
    expected = r"onnxruntime cannot open .*\\udce9/model.onnx, because its path is not valid UTF-8"
    with pytest.raises(EngineError, match=expected) as caught:
        await open_model(path, ModelOptions(engine="onnxruntime", threads=1))
    assert str(caught.value).isprintable()
    async with await open_model(path, ModelOptions(engine="openvino", threads=1)) as model:
        assert (await model.encode(["a text"])).vectors.shape[0] == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08", b"x" * 99])
async def test_file_that_is_no_graph_is_refused(folder: Path, content: bytes) -> None:
    replace(folder, "model.onnx", content)
    with pytest.raises((ArtifactError, EngineError), match=r"model.onnx"):
        await open_model(folder, ModelOptions(engine="onnxruntime"))


async def test_graph_without_end_is_stopped_at_the_limit_of_the_self_check(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    edit_graph(folder, CPU_GRAPHS["onnxruntime"], make_slow)
    monkeypatch.setattr(opening, "_SELF_CHECK_S", 0.5)
    monkeypatch.setattr(opening, "_SELF_CHECK_S_PER_BYTE", 0)
    with pytest.raises(EngineError, match="self-check failed: the graph has computed for more"):
        await open_model(folder, ModelOptions(engine="onnxruntime"))
    assert "abandoned" not in caplog.text


async def test_graph_without_end_is_stopped_with_its_caller(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    edit_graph(folder, CPU_GRAPHS["onnxruntime"], make_slow)
    begun, ended = Event(), Event()

    def watched(*arguments: Any) -> Any:  # noqa: ANN401
        begun.set()
        try:
            return engines.self_check(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(opening, "self_check", watched)
    loading = asyncio.create_task(open_model(folder, ModelOptions(engine="onnxruntime")))
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert ended.is_set()
    assert "abandoned" not in caplog.text


async def test_loop_is_refused_for_an_engine_that_cannot_cancel_it(folder: Path) -> None:
    edit_graph(folder, CPU_GRAPHS["openvino"], partial(make_slow, iterations=1))
    with pytest.raises(ArtifactError, match=r"model.openvino.onnx has the operator Loop"):
        await open_model(folder, ModelOptions(engine="openvino"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"padding": PADDING}, "has padding, which the service sets itself"),
        ({"truncation": TRUNCATION}, "has truncation, which the service sets itself"),
        ({"version": []}, "is invalid"),
        *(
            (
                {
                    "post_processor": {
                        "type": "TemplateProcessing",
                        **TEMPLATE,
                        name: [SEQUENCE] * 9,
                    }
                },
                "is invalid: its post_processor repeats a text",
            )
            for name in ("single", "pair")
        ),
        ({"model": {"type": "x"}}, "is invalid"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "is invalid: the tokenizers library panicked: ",
        ),
        (
            {
                "post_processor": {
                    "type": "BertProcessing",
                    "sep": ["[SEP]", 102],
                    "cls": ["[CLS]", 99_999],
                }
            },
            "has the token id 99999; vocab_size in manifest.json is 30522",
        ),
        (
            {
                "added_tokens": [
                    {
                        "id": 40_000,
                        "content": "<x>",
                        "single_word": False,
                        "lstrip": False,
                        "rstrip": False,
                        "normalized": False,
                        "special": True,
                    }
                ]
            },
            "has the token id",
        ),
    ],
)
async def test_faulty_tokenizer_is_refused(
    folder: Path, values: dict[str, object], message: str
) -> None:
    edit(folder, TOKENIZER, **values)
    with pytest.raises(ArtifactError, match=f"tokenizer.json {message}"):
        await open_model(folder)


async def test_maximum_length_without_room_for_text_is_refused(folder: Path) -> None:
    edit(folder, MANIFEST, max_tokens=2)
    with pytest.raises(ArtifactError, match=r"max_tokens is 2, .* adds 2 special tokens"):
        await open_model(folder)


def npy(array: object) -> bytes:
    stream = BytesIO()
    np.save(stream, np.asarray(array), allow_pickle=True)
    return stream.getvalue()


def npz() -> bytes:
    stream = BytesIO()
    np.savez(stream, a=np.zeros(3))
    return stream.getvalue()


WEIGHTS = npy(np.zeros(32, np.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is invalid"),
        (b"PK\x03\x04", "is invalid"),
        (npz(), "is invalid: it is an archive, not an array"),
        (npy([{}]), "is invalid: .*pickle"),
        (npy(np.zeros(32)), "has shape .* and dtype float64"),
        (npy(np.zeros((2, 16), np.float32)), r"has shape \(2, 16\)"),
        (WEIGHTS.replace(b"(32,)", b"(-1,)"), ""),
        (WEIGHTS.replace(b"(32,), ", b"(10**9,"), "is invalid"),
        (WEIGHTS[:-1], "is invalid"),
        (npy(np.full(32, np.nan, np.float32)), "has an infinity or a NaN"),
        (npy(np.full(32, -np.inf, np.float32)), "has an infinity or a NaN"),
    ],
)
def test_faulty_weights_of_queries_are_refused(folder: Path, content: bytes, message: str) -> None:
    replace(folder, QUERY_WEIGHTS, content)
    rules = {"query": {"max_tokens": 9, "looks_up": True}}
    edit(folder, MANIFEST, token_rules=rules, vocab_size=32, baseline_ids={})
    with pytest.raises(ArtifactError, match=f"query_weights.npy {message}"):
        read_query_weights(Artifact.load(folder))
