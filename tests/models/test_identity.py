"""Tests of `models.identity`: which changes of an artifact make it another model."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

from models.artifact import Artifact
from models.engines import Precision
from models.export.exporter import export
from models.export.onnx_graph import trace
from models.export.sentence_config import Overrides
from models.export.sources import resolve
from models.identity import EXCLUDED_FIELDS, EXCLUDED_FILES, EXCLUDED_GRAPH_FIELDS, identity_of
from models.manifest import Graph, LengthQuality, Manifest, Quality, TokenRules

pytestmark = pytest.mark.slow

QUALITY = Quality(
    is_generated=False,
    calibration_texts=10,
    evaluated_texts=20,
    measures={"mean_cosine": 0.999},
    by_length=(LengthQuality(source="own", min_tokens=1, max_tokens=32, texts=20, measures={}),),
    check={"pooled": {"cosine": 0.99, "norm": 0.01}},
    costs={"layers.0.linear1": 0.1},
    float_layers=("layers.1.linear2",),
)
PARITY = {"worst_cosine": 1.0, "worst_norm": 1e-7, "max_abs": 1e-6}


def graph(file: str, weights: str, engine: str, dtype: str = "float32") -> Graph:
    quality = QUALITY if dtype == "int8" else None
    return Graph(
        file=file,
        weights=weights,
        engine=engine,
        dtype=dtype,
        opset=20,
        parity=PARITY,
        quality=quality,
    )


# Every field has a value, so that every field can be changed.
MANIFEST = Manifest(
    name="a model",
    source="a folder",
    revision="abc",
    family="bert",
    weights_sha256={"model.safetensors": "01"},
    outputs=("pooled", "tokens"),
    labels=("bad", "good"),
    activation="sigmoid",
    width=32,
    hidden_size=32,
    windows=(None, 16),
    vocab_size=100,
    max_tokens=64,
    pooling=("mean",),
    heads=("Dense",),
    include_prompt=True,
    normalize=True,
    similarity="cosine",
    matryoshka_dimensions=(8, 16),
    truncation_side="right",
    prompts={"query": "query: ", "document": "passage: "},
    default_prompt="query",
    adapters=("query", "document"),
    token_rules={
        "": TokenRules(max_tokens=64),
        "query": TokenRules(
            max_tokens=32, min_tokens=32, filler=3, skipped=(4,), kept=(5,), unweighted=(6,)
        ),
    },
    graphs=(
        graph("model.openvino.onnx", "model.weights", "openvino"),
        graph("model.onnx", "model.weights", "onnxruntime"),
        graph("model.int8.onnx", "model.int8.weights", "openvino", "int8"),
        graph("model.cuda.onnx", "model.cuda.weights", "cuda", "float16"),
    ),
    files={
        name: f"{index:02}"
        for index, name in enumerate(
            (
                "calibration.json",
                "check.json",
                "model.cuda.onnx",
                "model.cuda.weights",
                "model.int8.onnx",
                "model.int8.weights",
                "model.onnx",
                "model.openvino.onnx",
                "model.weights",
                "query_weights.npy",
                "source/1_Pooling/config.json",
                "source/model.safetensors",
                "tokenizer.json",
            )
        )
    },
    versions={"torch": "2.0"},
)
ENGINES: dict[tuple[str, Precision], set[str]] = {
    ("onnxruntime", "float32"): {"model.onnx", "model.weights"},
    ("openvino", "float32"): {"model.openvino.onnx", "model.weights"},
    ("openvino", "bfloat16"): {"model.openvino.onnx", "model.weights"},
    ("openvino", "int8"): {"model.int8.onnx", "model.int8.weights"},
    ("cuda", "float16"): {"model.cuda.onnx", "model.cuda.weights"},
}


def identity(
    manifest: Manifest,
    engine: str = "onnxruntime",
    precision: Precision = "float32",
    path: str = "/nowhere",
) -> str:
    return identity_of(Artifact(Path(path), manifest), engine, precision)


# A field is read for each value or for none, so few values of each of the 60 fields show it.
few = settings(max_examples=20)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(0, 1) | st.text(max_size=4),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=4), parts),
    max_leaves=4,
)


def names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def differ(value: object, other: object) -> bool:
    """Return whether two values are different JSON; in Python, True equals 1."""
    return json.dumps(value, sort_keys=True) != json.dumps(other, sort_keys=True)


@pytest.mark.parametrize("name", sorted({*names(Manifest)} - {"graphs", "files", "token_rules"}))
@few
@given(value=VALUES)
def test_each_field_is_part_of_the_identity_or_listed_as_excluded(name: str, value: Any) -> None:  # noqa: ANN401 - any JSON
    assume(differ(value, getattr(MANIFEST, name)))
    other = replace(MANIFEST, **{name: value})
    assert (identity(other) == identity(MANIFEST)) == (name in EXCLUDED_FIELDS)


@pytest.mark.parametrize("kind", ["", "query"])
@pytest.mark.parametrize("name", names(TokenRules))
@few
@given(value=VALUES)
def test_each_token_rule_is_part_of_the_identity(name: str, kind: str, value: Any) -> None:  # noqa: ANN401 - any JSON
    rules = MANIFEST.token_rules[kind]
    assume(differ(value, getattr(rules, name)))
    changed = {**MANIFEST.token_rules, kind: replace(rules, **{name: value})}
    assert identity(replace(MANIFEST, token_rules=changed)) != identity(MANIFEST)


@pytest.mark.parametrize("name", sorted({*names(Graph)} - {"engine", "dtype", "file", "weights"}))
@few
@given(value=VALUES)
def test_each_field_of_the_own_graph_is_part_or_listed_as_excluded(name: str, value: Any) -> None:  # noqa: ANN401 - any JSON
    others, own = MANIFEST.graphs[:1] + MANIFEST.graphs[2:], MANIFEST.graphs[1]
    assume(differ(value, getattr(own, name)))
    changed = replace(MANIFEST, graphs=(*others, replace(own, **{name: value})))
    assert (identity(changed) == identity(MANIFEST)) == (name in EXCLUDED_GRAPH_FIELDS)


def test_names_of_the_graph_and_its_weights_are_not_part_of_the_identity() -> None:
    own = replace(MANIFEST.graphs[1], file="other.onnx", weights="other.weights")
    files = {
        **MANIFEST.files,
        "other.onnx": MANIFEST.files["model.onnx"],
        "other.weights": MANIFEST.files["model.weights"],
    }
    del files["model.onnx"]  # the weights are those of another graph too
    graphs = (MANIFEST.graphs[0], own, *MANIFEST.graphs[2:])
    assert identity(replace(MANIFEST, graphs=graphs, files=files)) == identity(MANIFEST)


@pytest.mark.parametrize("name", [*MANIFEST.files, "a new file"])
@pytest.mark.parametrize(("engine", "precision"), ENGINES)
@pytest.mark.parametrize("digest", ["ff", None])
def test_each_file_is_part_of_the_identity_unless_it_is_excluded_or_of_another_graph(
    name: str, engine: str, precision: Precision, digest: str | None
) -> None:
    graph_files = set().union(*ENGINES.values())
    own = ENGINES[engine, precision]
    if digest is None and (name in own or name == "a new file"):
        return
    files = {key: value for key, value in MANIFEST.files.items() if key != name or digest}
    changed = replace(MANIFEST, files=files | ({name: digest} if digest else {}))
    is_excluded = name.partition("/")[0] in EXCLUDED_FILES or name in graph_files - own
    is_equal = identity(changed, engine, precision) == identity(MANIFEST, engine, precision)
    assert is_equal == is_excluded


def test_older_artifacts_keep_their_identity() -> None:
    assert (MANIFEST.unknown_id, MANIFEST.prompt_adapters) == (None, {})
    assert identity(MANIFEST).startswith("3fd414617fac49e0")  # before the fields existed


def test_engines_and_precisions_have_different_identities() -> None:
    identities = {identity(MANIFEST, *engine) for engine in ENGINES}
    assert len(identities) == len(ENGINES)


def test_other_graphs_are_not_part_of_the_identity() -> None:
    files = dict(MANIFEST.files)
    for name in set().union(*ENGINES.values()) - ENGINES["onnxruntime", "float32"]:
        del files[name]
    alone = replace(MANIFEST, graphs=MANIFEST.graphs[1:2], files=files)
    assert identity(alone) == identity(MANIFEST)


def test_excluded_names_exist() -> None:
    assert EXCLUDED_FIELDS.keys() <= {*names(Manifest)}
    assert EXCLUDED_GRAPH_FIELDS.keys() <= {*names(Graph)}


def test_readme_lists_what_is_excluded() -> None:
    _, _, text = Path("service/README.md").read_text().partition("| not part of it | |\n")
    table, _, _ = text.partition("\n\n")
    files = {f"{name}/" if name in {"source", "spaces"} else name for name in EXCLUDED_FILES}
    measured = {"parity", "quality"}
    assert measured <= EXCLUDED_GRAPH_FIELDS.keys()
    for name in (*EXCLUDED_FIELDS, *files, *measured):
        assert f"`{name}`" in table


def test_identity_does_not_depend_on_the_path_and_the_order_of_mappings() -> None:
    reordered = replace(
        MANIFEST,
        prompts=dict(reversed([*MANIFEST.prompts.items()])),
        files=dict(reversed([*MANIFEST.files.items()])),
        token_rules=dict(reversed([*MANIFEST.token_rules.items()])),
        graphs=MANIFEST.graphs[::-1],
    )
    assert identity(reordered, path="/elsewhere") == identity(MANIFEST)


def test_same_settings_exported_again_have_the_same_identity(
    small_artifact: Artifact, small_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = identity_of(small_artifact, "onnxruntime", "float32")
    folder = tmp_path / "another name"
    shutil.copytree(small_folder, folder)
    with monkeypatch.context() as patch:
        patch.setattr("models.export.exporter.trace", trace)  # again, in place of the shared one
        patch.setattr("torch.__version__", TorchVersion("2.13.0+another.build"))
        again, _ = export(resolve(str(folder)), tmp_path / "again", copy_source=False)
    assert again.manifest.name != small_artifact.manifest.name
    assert identity_of(again, "onnxruntime", "float32") == expected
    others = [
        Overrides(normalize=not small_artifact.manifest.normalize),
        Overrides(max_tokens=8, prompts={"query": "query: "}),
    ]
    identities = {expected}
    for index, overrides in enumerate(others):
        other, _ = export(resolve(str(folder)), tmp_path / str(index), overrides=overrides)
        identities.add(identity_of(other, "onnxruntime", "float32"))
    assert len(identities) == 1 + len(others)
