"""New versions of a model that would break its clients: which differences, and when they count."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.artifact import Artifact
from models.engines import weight_bytes
from models.manifest import CHECK, MANIFEST, Manifest
from service.inference.errors import InvalidInput, NotReady
from service.inference.registry.compatibility import incompatibilities
from tests.batchers import ManualClock
from tests.hostile_artifacts import edit
from tests.models.checkpoints import edit_json
from tests.service.inference.registry.conftest import loaded, opened, spec, watched


def manifest(**fields: Any) -> Manifest:  # noqa: ANN401 - those of a manifest
    own: dict[str, Any] = {
        "outputs": ("pooled", "tokens"),
        "width": 32,
        "similarity": "cosine",
        "labels": (),
        "activation": "identity",
        "spaces": {},
    }
    rest = dict.fromkeys(Manifest.__dataclass_fields__.keys() - own.keys(), None)
    return Manifest(**{**rest, **own, **fields})


@pytest.mark.parametrize(
    ("old", "new", "phrase"),
    [
        ({}, {"width": 48}, "the width 48 in place of 32"),
        ({}, {"similarity": "dot"}, "the similarity dot in place of cosine"),
        ({}, {"outputs": ("pooled",)}, "the outputs pooled in place of pooled, tokens"),
        ({"outputs": ("pooled",)}, {"outputs": ("sparse", "pooled")}, "the outputs sparse, pooled"),
        ({}, {"similarity": None}, "the similarity none in place of cosine"),
        ({"labels": ("a", "b")}, {"labels": ("b", "a")}, "the label 'b' in place of 'a'"),
        ({"labels": ("a", "b")}, {"labels": ("a", "c")}, "the label 'c' in place of 'b'"),
        ({"labels": ("a", "b")}, {"labels": ("a",)}, "1 labels in place of 2"),
        ({"activation": "sigmoid"}, {}, "the activation identity in place of sigmoid"),
        ({"spaces": {"v": "a" * 64}}, {}, "the model none in place of aaaaaaaaaaaa as space v"),
        (
            {"spaces": {"v": "a" * 64}},
            {"spaces": {"v": "b" * 64}},
            "the model bbbbbbbbbbbb in place of aaaaaaaaaaaa as space v",
        ),
    ],
)
def test_difference_names_both_values(
    old: dict[str, Any], new: dict[str, Any], phrase: str
) -> None:
    (difference,) = incompatibilities(manifest(**old), manifest(**new))
    assert difference.startswith(phrase)


def test_other_settings_and_further_outputs_are_compatible() -> None:
    changes = {"outputs": ("pooled", "tokens", "weights"), "normalize": True, "prompts": {"a": "b"}}
    changes["spaces"] = {"v": "a" * 64}
    assert incompatibilities(manifest(), manifest(**changes)) == []
    named = manifest(labels=("a", "b"))
    assert incompatibilities(named, replace(named, max_tokens=9, vocab_size=7)) == []


CHANGES: dict[str, list[Any]] = {
    "outputs": [("pooled",), ("sparse",), ("logits",)],
    "width": [32, 48],
    "similarity": ["cosine", "dot", None],
    "labels": [(), ("a",), ("a", "b"), ("b", "a")],
    "activation": ["identity", "softmax"],
    "spaces": [{"v": "a" * 64}, {"v": "b" * 64}],
}
MANIFESTS = st.fixed_dictionaries({name: st.sampled_from(v) for name, v in CHANGES.items()})


@given(MANIFESTS, MANIFESTS)
def test_each_changed_field_is_one_difference(old: dict[str, Any], new: dict[str, Any]) -> None:
    differences = incompatibilities(manifest(**old), manifest(**new))
    assert len(differences) == sum(old[name] != new[name] for name in CHANGES)


Edit = Callable[..., Path]


@pytest.fixture
def edited(small_artifact: Artifact, tmp_path: Path) -> Edit:
    """Return the path of the small model's artifact with other fields in its manifest."""

    def edit(name: str, **fields: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(small_artifact.path, folder)
        edit_json(folder / MANIFEST, **fields)
        return folder

    return edit


async def test_incompatible_version_is_refused_unless_it_is_allowed(edited: Edit) -> None:
    old, dot = edited("old"), edited("dot", similarity="dot")
    async with opened(spec(old, "a")) as registry:
        before = registry.current("a")
        with pytest.raises(InvalidInput, match="similarity dot in place of cosine") as error:
            await registry.load(spec(dot, "a"))
        assert (error.value.code, error.value.pointer) == ("incompatible", "/path")
        assert registry.current("a") is before
        await registry.load(spec(old, "a"))
        await registry.load(spec(dot, "a"), allow_incompatible=True)
        assert registry.current("a").artifact.manifest.similarity == "dot"
        assert [status.manifest.similarity for status in registry.statuses()] == ["dot"]
        with pytest.raises(InvalidInput, match="similarity cosine in place of dot"):
            await registry.load(spec(old, "a"))
        await registry.load(spec(dot, "another"))  # a new model has no clients


async def test_added_output_is_missed_when_it_is_gone(edited: Edit) -> None:
    few, many = edited("few"), edited("many")
    own = Artifact.load(few).manifest
    assert own.outputs == ("pooled", "tokens")
    edit(few, MANIFEST, outputs=["pooled"])
    edit(few, CHECK, outputs={"pooled": Artifact.load(many).check().outputs["pooled"]})
    async with opened(spec(few, "a")) as registry:
        await registry.load(spec(many, "a"))
        with pytest.raises(InvalidInput, match="outputs pooled in place of pooled, tokens"):
            await registry.load(spec(few, "a"))


async def test_unloaded_model_whose_artifact_became_incompatible_is_not_served(
    edited: Edit, small_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    paths = edited("a"), edited("b")
    budget = weight_bytes(small_artifact)
    clock = ManualClock()
    specs = [spec(path, path.name) for path in paths]
    async with opened(*specs, max_bytes=budget, clock=clock) as registry:
        assert loaded(registry) == ["a"]
        edit_json(paths[1] / MANIFEST, similarity="dot")
        with pytest.raises(NotReady, match="cannot be loaded") as error:
            await registry.lease("b")
        assert error.value.code == "load_failed"
        assert "the similarity dot in place of cosine" in caplog.text
        edit_json(paths[1] / MANIFEST, similarity="cosine")
        await clock.advance(60)
        with await registry.lease("b") as model:
            assert model.artifact.manifest.similarity == "cosine"
        edit_json(paths[1] / MANIFEST, similarity="dot")
        model, _ = await registry.load(spec(paths[1], "b"), allow_incompatible=True)
        assert model.artifact.manifest.similarity == "dot"


async def test_watch_keeps_the_old_version_and_logs_the_differences(
    edited: Edit, small_artifact: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    path = edited("a")
    async with watched(lambda: [spec(path, "a")]) as (registry, watch):
        before = registry.current("a")
        for name, value in (("similarity", "euclidean"), ("activation", "sigmoid")):
            caplog.clear()
            shutil.rmtree(path)
            shutil.copytree(small_artifact.path, path)
            edit_json(path / MANIFEST, **{name: value})
            await watch.scan()
            assert registry.current("a") is before
            (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
            expected = f"cannot load {path}: the new version has the {name} {value} in"
            assert expected in record.message
            assert record.exc_info is None
