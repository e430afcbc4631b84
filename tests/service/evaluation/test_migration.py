"""Maps of a new model's queries into the vectors of an old model, from their fit to a request."""

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from scipy.stats import ortho_group
from sklearn.linear_model import LinearRegression
from starlette.testclient import TestClient
from torch.nn import functional as F

import vitrine
from models.artifact import Artifact, hashes
from models.identity import identity_of
from models.manifest import MANIFEST, SIGNATURE, ArtifactError
from models.signing import read_private_key
from models.spaces import read_spaces
from service.app import create_app
from service.evaluation import migration
from service.evaluation.command_line import main as evaluate
from service.evaluation.comparison import read_evaluation
from service.evaluation.maps import Map, fit_maps
from service.evaluation.measures import measure
from service.evaluation.migrate_command import main
from service.evaluation.migration import FULL, OLD, fit
from service.inference.errors import InvalidInput
from service.settings import CacheSettings, ModelSettings, Settings
from tests.hostile_artifacts import copy_of
from tests.models.checkpoints import edit_json
from tests.serving import serving
from tests.signing_keys import new_key

pytestmark = pytest.mark.slow

TEXTS = ["w7 w8 w9", "w10 w11", "w12"]


def draw(count: int, width: int) -> Any:  # noqa: ANN401
    vectors = np.random.default_rng(4).normal(size=(count, width))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_rotation_of_the_vectors_is_found_exactly() -> None:
    x, rotation = draw(400, 12), ortho_group.rvs(12, random_state=1)
    maps = fit_maps(x, x @ rotation.T)
    bounds = {"orthogonal": 1e-4, "affine": 1e-4, "ranked": 1e-3}  # Adam amplifies rounding errors
    for name, own in maps.items():
        np.testing.assert_allclose(own(x), x @ rotation.T, atol=bounds[name])
    exact = maps["orthogonal"].matrix
    np.testing.assert_allclose(exact, orthogonal_procrustes(x, x @ rotation.T)[0].T)


@pytest.mark.parametrize("widths", [(12, 12), (12, 7), (7, 12)])
def test_affine_map_is_that_of_least_squares_and_others_keep_lengths(
    widths: tuple[int, int],
) -> None:
    x = draw(700, widths[0])
    noise = np.random.default_rng(5).normal(size=(700, widths[1]))
    y = x @ np.random.default_rng(6).normal(size=widths) + 0.3 + 0.01 * noise
    maps = fit_maps(x, y)
    expected = LinearRegression().fit(x, y)
    np.testing.assert_allclose(maps["affine"](x), expected.predict(x), atol=5e-3)
    matrix = maps["orthogonal"].matrix
    small = matrix @ matrix.T if widths[1] <= widths[0] else matrix.T @ matrix
    np.testing.assert_allclose(small, np.eye(min(widths)), atol=1e-9)


@pytest.mark.parametrize("widths", [(12, 12), (12, 7), (7, 12)])
def test_ranked_map_is_that_of_torch(widths: tuple[int, int]) -> None:
    x = draw(300, widths[0])
    y = np.tanh(x @ np.random.default_rng(6).normal(size=widths))
    x[7] = y[8] = 0
    maps = fit_maps(x, y)
    own, other = torch.from_numpy(x), torch.from_numpy(y)
    matrix = torch.tensor(maps["orthogonal"].matrix, requires_grad=True)
    optimizer = torch.optim.Adam([matrix], lr=3e-4)
    targets = (F.normalize(own) @ F.normalize(own).T / 0.05).softmax(1)
    for _ in range(100):  # 300 documents are one batch
        optimizer.zero_grad()
        cosines = F.normalize(own @ matrix.T) @ F.normalize(other).T
        F.cross_entropy(cosines / 0.05, targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = matrix.detach().numpy()
    np.testing.assert_allclose(maps["ranked"].matrix, expected, atol=1e-6)


@pytest.fixture(scope="module")
def evaluations(
    calibrated_artifact: Artifact,
    other_artifact: Artifact,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Evaluations of two models: the folders `old` and `new`, whose model has prompts."""
    folder = tmp_path_factory.mktemp("evaluations")
    draw_words = np.random.default_rng(1)
    records = [
        {"id": f"d{i}", "text": " ".join(f"w{n}" for n in draw_words.integers(5, 60, 6))}
        for i in range(120)
    ]
    texts = folder / "texts.jsonl"
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "qrels.txt").write_text("".join(f"d{i} 0 d{i} 1\n" for i in range(120)))
    shared = ["--corpus", str(texts), "--queries", str(texts), "--qrels", str(folder / "qrels.txt")]
    for name, artifact in (("old", other_artifact), ("new", calibrated_artifact)):
        assert evaluate([str(folder / name), *shared, "--model", str(artifact.path)]) == 0
    return folder


def migrate(folder: Path, output: Path, *options: str, old: str = "old", new: str = "new") -> int:
    folders = ["--old", str(folder / old), "--new", str(folder / new)]
    return main([str(output), *folders, "--space", "v1", *options])


@pytest.fixture(scope="module")
def migrated(evaluations: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The new model with the space `v1` of the old one."""
    output = tmp_path_factory.mktemp("migrated") / "artifact"
    assert migrate(evaluations, output, "--min-recall", "0") == 0
    return Artifact.load(output)


@pytest.mark.parametrize("name", ["write_space", "write_manifest"])
def test_full_disk_is_named(
    name: str,
    evaluations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"service.evaluation.migrate_command.{name}", fail)
    assert migrate(evaluations, tmp_path / "out", "--min-recall", "0") == 2
    problem = f"vitrine migrate: {tmp_path}/out cannot be written: No space left on device"
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_name_of_the_output_is_printed_without_its_line_breaks_and_escape_sequences(
    evaluations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate(evaluations, tmp_path / "a\n\x1b[31m", "--min-recall", "0") == 0
    printed = capsys.readouterr().out
    assert "\x1b[31m" not in printed
    assert f'{tmp_path}/a\\n\\x1b[31m takes "space": "v1"' in printed


@pytest.fixture(scope="module")
def client(migrated: Artifact) -> Iterator[TestClient]:
    settings = Settings(
        model=ModelSettings(path=migrated.path), cache=CacheSettings(max_bytes=2**20)
    )
    with serving(create_app(settings)) as own:
        yield own


def mapped(artifact: Artifact, vectors: Any) -> Any:  # noqa: ANN401
    """Return vectors by the numbers in the file of the map, in float64."""
    table = np.load(artifact.path / "spaces" / "v1.npy").astype(float)
    result = np.array(vectors, float) @ table[:, :-1].T + table[:, -1]
    return result / np.linalg.norm(result, axis=1, keepdims=True)


def test_vectors_of_queries_are_mapped(client: TestClient, migrated: Artifact) -> None:
    own = client.post("/encode", json={"inputs": TEXTS, "prompt_name": "query"})
    assert "X-Space-Version" not in own.headers
    # those of the cache too
    for _ in range(2):
        answer = client.post("/encode", json={"inputs": TEXTS, "space": "v1"})
        expected = mapped(migrated, own.json()["embeddings"])
        np.testing.assert_allclose(answer.json()["embeddings"], expected, atol=1e-6)
    described = client.get("/info").json()["spaces"]["v1"]
    assert answer.headers["X-Space-Version"] == described["sha256"][:12]
    assert described["measures"]["recall_ratio"] < 1
    assert described["prompt_name"] == "query"
    again = client.post("/encode", json={"inputs": TEXTS, "prompt_name": "query"})
    assert again.json()["embeddings"] == own.json()["embeddings"]
    body = {"inputs": TEXTS, "space": "v1", "output": ["pooled"]}
    several = client.post("/encode", json=body)
    pooled = several.json()["outputs"]["pooled"]["embeddings"]
    np.testing.assert_allclose(pooled, expected, atol=1e-6)
    assert several.headers["X-Space-Version"] == described["sha256"][:12]
    octets = client.post(
        "/encode",
        json={"inputs": TEXTS, "space": "v1"},
        headers={"Accept": "application/octet-stream"},
    )
    assert octets.headers["X-Shape"] == "3,32"
    vectors = np.frombuffer(octets.content, "<f4").reshape(3, 32)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "pointer", "message"),
    [
        ({"space": "v2"}, "/space", "unknown space; the model has v1"),
        ({"dimensions": 8}, "/dimensions", "dimensions does not apply to vectors in a space"),
        ({"truncate_dim": 8}, "/truncate_dim", "does not apply to vectors in a space"),
        ({"normalize": False}, "/normalize", "does not apply to vectors in a space"),
        ({"output_dtype": "binary"}, "/output_dtype", "does not apply to vectors in a space"),
        ({"chunking": {"size": 8}}, "/chunking", "does not apply to vectors in a space"),
        ({"output": "tokens"}, "/space", "space does not apply to the output"),
    ],
)
def test_fields_that_do_not_apply_to_a_space_are_refused(
    client: TestClient, fields: dict[str, Any], pointer: str, message: str
) -> None:
    body = {"inputs": TEXTS, "space": "v1", **fields}
    refused = client.post("/encode", json=body)
    assert (refused.status_code, refused.json()["pointer"]) == (422, pointer)
    assert message in refused.json()["detail"]


def test_python_maps_too_and_names_the_spaces(migrated: Artifact, small_artifact: Artifact) -> None:
    with vitrine.SyncModel(migrated.path) as model:
        for prompt_name in (None, "query", "document"):
            own = model.encode(TEXTS, prompt_name=prompt_name or "query").vectors
            actual = model.encode(TEXTS, prompt_name=prompt_name, space="v1").vectors
            np.testing.assert_allclose(actual, mapped(migrated, own), atol=1e-6)
        # Token ids have no prompt.
        ids = [2, 7, 8, 3]
        both = [model.encode([ids]).vectors, model.encode("w7", prompt_name="query").vectors]
        actual = model.encode([ids, "w7"], space="v1").vectors
        np.testing.assert_allclose(actual, mapped(migrated, np.concatenate(both)), atol=1e-6)
        with pytest.raises(InvalidInput, match="space applies to the output pooled alone"):
            model.encode_outputs(TEXTS, ("tokens",), space="v1")
        with pytest.raises(InvalidInput, match="space must be the name of a space"):
            model.encode(TEXTS, space=1)  # type: ignore[arg-type]
    with (
        vitrine.SyncModel(small_artifact.path) as model,
        pytest.raises(InvalidInput, match="the model has none; vitrine migrate adds them"),
    ):
        model.encode(TEXTS, space="v1")


def test_space_leaves_the_version_of_the_model(
    migrated: Artifact, calibrated_artifact: Artifact
) -> None:
    own = [identity_of(each, "onnxruntime", "float32") for each in (migrated, calibrated_artifact)]
    assert own[0] == own[1]


def test_map_between_equal_models_changes_nothing(
    evaluations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate(evaluations, tmp_path / "same", old="new") == 0
    assert "1.000 of the recall of full re-embedding" in capsys.readouterr().out
    space = read_spaces(Artifact.load(tmp_path / "same"))["v1"]
    with vitrine.SyncModel(tmp_path / "same") as model:
        vectors = model.encode(TEXTS).vectors
    np.testing.assert_allclose(space.map(vectors), vectors, atol=2e-3)


def test_weak_map_is_not_written(
    evaluations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate(evaluations, tmp_path / "weak", "--min-recall", "1") == 1
    assert "and --min-recall is 1: nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "weak").exists()


def test_evaluations_that_do_not_fit_together_are_refused(
    evaluations: Path, small_artifact: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text((evaluations / "texts.jsonl").read_text().split("\n")[0] + "\n")
    shared = ["--corpus", str(few), "--queries", str(few), "--model", str(small_artifact.path)]
    assert evaluate([str(tmp_path / "few"), *shared]) == 0
    corpus = ["--corpus", str(evaluations / "texts.jsonl")]
    queries = ["--queries", corpus[1], "--qrels", str(evaluations / "qrels.txt")]
    cut = ["--dimensions", "8", "--model", str(small_artifact.path)]
    assert evaluate([str(tmp_path / "cut"), *corpus, *queries, *cut]) == 0
    chunks = ["--chunking", "tokens", "--model", str(small_artifact.path)]
    assert evaluate([str(tmp_path / "chunks"), *corpus, *queries, *chunks]) == 0
    new = str(evaluations / "new")
    for old, own, message in (
        (
            str(tmp_path / "chunks"),
            new,
            "has results of the kind chunks; a map needs dense vectors",
        ),
        (str(tmp_path / "few"), new, "is of another collection than"),
        (str(tmp_path / "few"), str(tmp_path / "few"), "0 queries have judgements"),
        (str(tmp_path / "cut"), new, "has vectors with --dimensions 8; evaluate without it"),
        (str(tmp_path), new, "has no finished evaluation"),
    ):
        assert migrate(evaluations, tmp_path / "out", old=old, new=own) == 2
        assert message in capsys.readouterr().err
    assert main([str(tmp_path / "out"), "--old", new, "--new", new, "--space", "a/b"]) == 2
    assert "--space must have 1 to 64 letters" in capsys.readouterr().err


def test_documents_of_the_whole_collection_are_fitted(
    evaluations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migration, "_MAX_PAIRS", 50)
    monkeypatch.setattr(migration, "_MIN_PAIRS", 40)
    old, new = (
        migration._files(read_evaluation(evaluations / name), "documents")
        for name in ("old", "new")
    )
    rows = migration._pairs(old, new)[1]
    monkeypatch.undo()
    np.testing.assert_array_equal(rows, migration._pairs(old, new)[1][::3])


@pytest.mark.parametrize("signs", [(1, -1), (-1, 1)])
def test_form_with_the_highest_recall_is_chosen(
    evaluations: Path, monkeypatch: pytest.MonkeyPatch, signs: tuple[int, int]
) -> None:
    def maps(x: Any, _y: Any) -> dict[str, Map]:  # noqa: ANN401
        width = x.shape[1]
        return {str(sign): Map(sign * np.eye(width), np.zeros(width)) for sign in signs}

    monkeypatch.setattr(migration, "fit_maps", maps)
    new = read_evaluation(evaluations / "new")
    result = fit(new, new)
    assert result.form == "1"
    assert result.recalls["1"] == result.recalls[FULL] > result.recalls["-1"]


def test_queries_that_choose_the_form_do_not_measure_it(
    evaluations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: set[frozenset[str]] = set()

    def spy(measures: Any, judgements: Any, rankings: Any) -> Any:  # noqa: ANN401
        measured.add(frozenset(judgements))
        return measure(measures, judgements, rankings)

    monkeypatch.setattr(migration, "measure", spy)
    result = fit(read_evaluation(evaluations / "old"), read_evaluation(evaluations / "new"))
    choosing, measuring = measured
    assert not choosing & measuring
    assert (len(choosing), len(measuring), result.queries) == (60, 60, 60)


def test_overlap_is_with_full_re_embedding(evaluations: Path) -> None:
    result = fit(read_evaluation(evaluations / "old"), read_evaluation(evaluations / "new"))
    assert result.overlaps[FULL] == 1
    assert result.overlaps[OLD] < 1


def test_evaluation_of_another_version_of_the_artifact_is_refused(
    evaluations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(evaluations / "new", tmp_path / "new")
    results = json.loads((tmp_path / "new" / "results.json").read_text())
    for job in results["jobs"].values():
        job["model version"] = "0" * 64
    edit_json(tmp_path / "new" / "results.json", jobs=results["jobs"])
    assert migrate(evaluations, tmp_path / "out", new=str(tmp_path / "new")) == 2
    assert "has another version than" in capsys.readouterr().err


def test_artifacts_of_a_migration_must_be_signed_if_signatures_are_required(
    evaluations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private, public = new_key(tmp_path, "key")
    for name in ("old", "new"):
        shutil.copytree(evaluations / name, tmp_path / "evaluations" / name)
        file = tmp_path / "evaluations" / name / "results.json"
        jobs = json.loads(file.read_text())["jobs"]
        copy = copy_of(Path(jobs["documents"]["artifact"]), tmp_path / name)
        for job in jobs.values():
            job["artifact"] = str(copy)
        edit_json(file, jobs=jobs)
        Artifact.load(copy).sign(read_private_key(private), name)
    monkeypatch.setenv("VITRINE_MODELS__VERIFY", str(public))
    assert migrate(tmp_path / "evaluations", tmp_path / "out", "--min-recall", "0") == 0
    for name in ("new", "old"):
        (tmp_path / name / SIGNATURE).rename(tmp_path / f"{name}.sig")
        assert migrate(tmp_path / "evaluations", tmp_path / "again") == 2
        assert f"the artifact {name} has no signature model.sig" in capsys.readouterr().err
        (tmp_path / f"{name}.sig").rename(tmp_path / name / SIGNATURE)


def test_space_of_the_artifact_is_not_replaced(
    evaluations: Path, migrated: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = str(evaluations / "texts.jsonl")
    shared = ["--corpus", texts, "--queries", texts, "--qrels", str(evaluations / "qrels.txt")]
    assert evaluate([str(tmp_path / "new"), *shared, "--model", str(migrated.path)]) == 0
    again = migrate(evaluations, tmp_path / "out", "--min-recall", "0", new=str(tmp_path / "new"))
    assert again == 2
    assert "already has the space v1" in capsys.readouterr().err


def test_second_space_of_a_model_without_unit_length(migrated: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(migrated.path, folder)
    edit_json(folder / "spaces" / "v1.json", normalizes=False)
    manifest = Artifact.load(migrated.path).manifest
    edit_json(folder / MANIFEST, spaces={"v0": "0" * 64, **manifest.spaces})
    for suffix in ("json", "npy"):
        shutil.copy(migrated.path / "spaces" / f"v1.{suffix}", folder / "spaces" / f"v0.{suffix}")
    table = np.load(folder / "spaces" / "v1.npy")
    table[:, -1] = np.linspace(-1, 1, len(table))
    np.save(folder / "spaces" / "v1.npy", table)
    list_files(folder)
    with vitrine.SyncModel(folder) as model:
        own, *found = (
            model.encode(TEXTS, prompt_name="query", space=name).vectors
            for name in (None, "v0", "v1")
        )
    expected = own @ table[:, :-1].T + table[:, -1]
    np.testing.assert_allclose(found[1], expected, atol=1e-6)
    np.testing.assert_allclose(found[0], mapped(migrated, own), atol=1e-6)
    assert np.abs(np.linalg.norm(expected, axis=1) - 1).max() > 0.01


def list_files(folder: Path) -> None:
    """List the files of an artifact in its manifest again."""
    manifest = json.loads((folder / MANIFEST).read_text())
    files = {name: digest for name, digest in hashes(folder).items() if name != MANIFEST}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"files": files}))


@pytest.mark.parametrize("damage", ["columns", "nan", "bytes", "field"])
def test_damaged_map_stops_the_model(migrated: Artifact, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(migrated.path, folder)
    table = folder / "spaces" / "v1.npy"
    content = np.load(table)
    match damage:
        case "columns":
            np.save(table, content[:, 1:])
        case "nan":
            np.save(table, content * np.float32("nan"))
        case "bytes":
            table.write_bytes(b"none")
        case "field":
            edit_json(folder / "spaces" / "v1.json", similarity="none")
    list_files(folder)
    with pytest.raises(ArtifactError, match="spaces/v1"):
        read_spaces(Artifact.load(folder))
