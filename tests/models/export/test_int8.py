"""`vitrine-export --precision int8`: rounding, the graph, its measured quality and its refusals."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper
from scipy.stats import spearmanr
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from models.artifact import Artifact
from models.engines import (
    ENGINES,
    OUTPUTS,
    Agreement,
    EngineError,
    cosines,
    open_engine,
    self_check,
)
from models.engines.cpus import cpu_flags
from models.engines.outputs import int8_bounds
from models.engines.with_openvino import INT8_GROUP
from models.export.__main__ import main
from models.export.calibration import text_rows
from models.export.int8.graph import calibration_rows
from models.export.int8.quality import QualityBounds, check_outputs, lowest, measure
from models.export.int8.rounding import quantize_activations, round_product, round_weights
from models.export.int8.rows import length_classes, longest_text, quality_rows, rows_by_length
from models.export.int8.texts import OwnTexts, VocabularyTexts
from models.export.model_folder import CheckpointError
from models.manifest import TOKENIZER, Graph, LengthQuality, Output, TextSource
from models.packing import pack
from tests.models.checkpoints import save_checkpoint, save_masked_lm, save_tokenizer
from tests.models.wrong_outputs import GROSS, assert_self_check_refuses
from tests.sentences import calibration_texts

pytestmark = pytest.mark.slow

UNUSABLE = ENGINES["openvino"].unusable("int8")
needs_int8 = pytest.mark.skipif(UNUSABLE is not None, reason=str(UNUSABLE))
Matrix = NDArray[np.float32]


def int8_graph(artifact: Artifact) -> Graph:
    return artifact.graph("openvino", "int8")


def correlated(count: int, width: int) -> Matrix:
    """Activations whose channels depend on each other, with a mean, and with an outlier channel."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, width // 4)) @ rng.normal(size=(width // 4, width))
    x += 0.3 * rng.normal(size=x.shape) + rng.normal(size=width) * 5
    x[:, 7] *= 40
    return x.astype(np.float32)


def random_weights(outputs: int, width: int) -> Matrix:
    return np.random.default_rng(2).normal(size=(outputs, width)).astype(np.float32)


@pytest.mark.parametrize("width", [INT8_GROUP, 2 * INT8_GROUP + 64])
def test_activations_are_those_of_torchs_fake_quantization(width: int) -> None:
    x = correlated(50, width)
    x[3, :INT8_GROUP] = 0
    for start in range(0, width, INT8_GROUP):
        part = torch.tensor(x[:, start : start + INT8_GROUP])
        scales = part.abs().amax(1) / 127
        scales[scales == 0] = 1
        zeros = torch.zeros(len(part), dtype=torch.int32)
        expected = torch.fake_quantize_per_channel_affine(part, scales, zeros, 0, -127, 127)
        actual = quantize_activations(x)[:, start : start + INT8_GROUP]
        # A value at the middle of two codes may be rounded to either.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=float(scales.max()) * 1.001)
        assert np.mean(np.abs(actual - expected.numpy()) > 1e-6 * scales.numpy()[:, None]) < 1e-3


def test_weights_of_independent_channels_are_rounded_to_the_nearest_code() -> None:
    x, weights = np.eye(16, dtype=np.float32), random_weights(5, 16)
    codes, scales = round_weights(weights, x)
    np.testing.assert_allclose(scales, np.abs(weights).max(1) / 127, rtol=1e-6)
    np.testing.assert_array_equal(codes, np.round(weights / scales[:, None]))


def test_rounding_compensates_errors_of_correlated_channels() -> None:
    x, weights = correlated(2000, 300), random_weights(40, 300)
    x -= x.mean(0)
    codes, scales = round_weights(weights, x)
    assert np.abs(codes.astype(int)).max() <= 127

    def error(rounded: NDArray[np.floating]) -> float:
        return float(((x @ (rounded * scales[:, None] - weights).T) ** 2).mean())

    assert error(codes.astype(np.float32)) < 0.5 * error(np.round(weights / scales[:, None]))


def test_quantised_product_is_that_of_float64_within_its_cost() -> None:
    x, weights = correlated(3000, 256), random_weights(30, 256)
    rounded = round_product(x[:2000], weights)
    assert rounded.weights.dtype == np.int8
    dequantised = rounded.weights * rounded.scales[:, None].astype(np.float64)

    def product(own: Matrix) -> NDArray[np.float64]:
        smoothed = (own - rounded.shift) / rounded.smoothing
        return quantize_activations(smoothed).astype(np.float64) @ dequantised.T + rounded.bias

    others = x[2000:]  # did not calibrate
    actual, expected = product(others), others @ weights.T.astype(np.float64)
    variance = expected.var(0)
    error = float(((actual - expected) ** 2 / variance).mean())
    assert rounded.cost / 2 < error < rounded.cost * 2
    # The bias has the mean error of the calibration.
    errors = product(x[:2000]) - x[:2000] @ weights.T.astype(np.float64)
    assert np.all(np.abs(errors.mean(0)) < 0.002 * errors.std(0))
    # Without shifts and smoothing, the outlier channel leaves few codes to the others.
    scales = np.abs(weights).max(1, keepdims=True) / 127
    plain = quantize_activations(others) @ (np.round(weights / scales) * scales).T
    assert error < 0.1 * float(((plain - expected) ** 2 / variance).mean())


@needs_int8
def test_graph_has_int8_weights_that_stand_for_the_models(int8_artifact: Artifact) -> None:
    exact = onnx.load(int8_artifact.path / int8_artifact.graph("openvino", "float32").file)
    graph = onnx.load(int8_artifact.path / int8_artifact.graph("openvino", "int8").file)
    tensors = {t.name: numpy_helper.to_array(t) for t in graph.graph.initializer}
    codes = {name: own for name, own in tensors.items() if own.dtype == np.int8}
    # Each of 2 layers has q, k, v, out, and two of the feed-forward network.
    assert len(codes) == 12
    gemms = {n.output[0]: n for n in exact.graph.node if n.op_type == "Gemm"}
    weights = {t.name: numpy_helper.to_array(t) for t in exact.graph.initializer}
    smoothing = {n.input[0]: n.input[1] for n in graph.graph.node if n.op_type == "Mul"}
    for name, own in codes.items():
        output = name.removesuffix("_codes")
        gemm = gemms[output]
        inverse = tensors[smoothing[gemm.input[0]]]
        actual = own * tensors[f"{output}_scales"] * inverse[:, None]
        expected = weights[gemm.input[1]].T
        assert np.abs(actual - expected).max() < 0.05 * np.abs(expected).max()


@needs_int8
def test_results_are_close_to_float32_and_to_onnxruntimes_of_the_same_graph(
    int8_artifact: Artifact,
) -> None:
    rows = [np.random.default_rng(i).integers(5, 60, 3 + i).tolist() for i in range(20)]
    batch = pack(rows)
    actual = open_engine(int8_artifact, "auto", "int8").run(batch)
    expected = open_engine(int8_artifact, "onnxruntime").run(batch)
    session = onnxruntime.InferenceSession(
        int8_artifact.path / int8_artifact.graph("openvino", "int8").file
    )
    (oracle,) = session.run(["pooled"], batch.inputs([p.name for p in session.get_inputs()]))
    assert cosines(actual, expected).min() > 0.999
    assert cosines(actual, oracle).min() > 0.999
    assert not np.array_equal(actual, expected)


@needs_int8
@pytest.mark.parametrize("output", ["pooled", "tokens"])
def test_self_check_rejects_wrong_int8_vectors(int8_artifact: Artifact, output: Output) -> None:
    engine = open_engine(int8_artifact, "openvino", "int8")
    assert_self_check_refuses(engine, int8_artifact, output, GROSS)


def test_bounds_are_twice_the_measured_deviations_and_limited() -> None:
    bounds = int8_bounds("pooled", {"cosine": 0.998, "norm": 0.01})
    assert (bounds.cosine, bounds.norm) == pytest.approx((0.996, 0.02))
    assert int8_bounds("pooled", {"cosine": 0.5, "norm": 3.0}) == Agreement(0.99, 0.1)
    assert int8_bounds("logits", {"cosine": 0.5, "norm": 3.0}) == Agreement(0.95, 0.1)


def with_check(artifact: Artifact, **pooled: float) -> Artifact:
    """Return the artifact with another measured check of its int8 graph in the manifest."""
    graphs = [*artifact.manifest.graphs]
    quality = graphs[-1].quality
    assert quality is not None
    check = {**quality.check, "pooled": {**quality.check["pooled"], **pooled}}
    graphs[-1] = replace(graphs[-1], quality=replace(quality, check=check))
    return replace(artifact, manifest=replace(artifact.manifest, graphs=tuple(graphs)))


@needs_int8
@pytest.mark.parametrize(
    "measured", [{"cosine": 0.9758}, {"cosine": float("nan")}, {"norm": 0.11}], ids=str
)
def test_start_refuses_a_manifest_whose_check_is_below_the_bound(
    int8_artifact: Artifact, measured: dict[str, float]
) -> None:
    engine = open_engine(int8_artifact, "openvino", "int8")
    with pytest.raises(EngineError, match=r"no acceptable check .* 'pooled': .* 0\.99 .* required"):
        self_check(engine, with_check(int8_artifact, **measured))


@needs_int8
def test_start_refuses_a_graph_without_a_measured_check(int8_artifact: Artifact) -> None:
    engine = open_engine(int8_artifact, "openvino", "int8")
    graphs = (*int8_artifact.manifest.graphs[:-1], replace(int8_graph(int8_artifact), quality=None))
    manifest = replace(int8_artifact.manifest, graphs=graphs)
    with pytest.raises(EngineError, match="no acceptable check of the int8 graph"):
        self_check(engine, replace(int8_artifact, manifest=manifest))


@needs_int8
def test_start_holds_twice_the_deviations_that_the_export_measured(
    int8_artifact: Artifact,
) -> None:
    engine = open_engine(int8_artifact, "openvino", "int8")
    worst = self_check(engine, int8_artifact)["pooled"]
    assert 0.99 < worst.cosine < 1
    within = with_check(int8_artifact, cosine=1 - (1 - worst.cosine) / 1.9)
    assert self_check(engine, within)["pooled"] == worst
    with pytest.raises(EngineError, match="self-check failed: the output 'pooled'"):
        self_check(engine, with_check(int8_artifact, cosine=1 - (1 - worst.cosine) / 2.1))


def test_quality_of_vectors_equals_a_search_for_neighbours(int8_artifact: Artifact) -> None:
    rng = np.random.default_rng(3)
    expected = rng.normal(size=(60, 8)).astype(np.float32)
    actual = expected + rng.normal(size=expected.shape).astype(np.float32) * np.float32(0.3)
    measures = measure(int8_artifact.manifest, expected, actual)
    units = [own / np.linalg.norm(own, axis=1, keepdims=True) for own in (expected, actual)]
    shared = 0
    for query in range(60):
        near = [
            set(sorted(set(range(60)) - {query}, key=(u @ u[query]).__getitem__)[-10:])
            for u in units
        ]
        shared += len(near[0] & near[1])
    both = (units[0] * units[1]).sum(1)
    assert measures == pytest.approx(
        {"mean_cosine": both.mean(), "worst_cosine": both.min(), "recall_at_10": shared / 600},
        abs=1e-4,
    )
    assert 0.3 < measures["recall_at_10"] < 0.95


def test_quality_of_scores_is_spearmans_correlation(int8_artifact: Artifact) -> None:
    rng = np.random.default_rng(4)
    expected = rng.normal(size=(60, 1)).astype(np.float32)
    actual = expected + rng.normal(size=expected.shape).astype(np.float32)
    manifest = replace(int8_artifact.manifest, outputs=("logits",), labels=("score",))
    measures = measure(manifest, expected, actual)
    own = [
        spearmanr(expected[start : start + 20, 0], actual[start : start + 20, 0]).statistic
        for start in (0, 20, 40)
    ]
    assert measures == pytest.approx({"rank_correlation": np.mean(own)}, abs=1e-4)


def test_quality_of_labels_is_the_share_of_equal_ones(int8_artifact: Artifact) -> None:
    expected = np.eye(4, 3, dtype=np.float32)
    actual = expected.copy()
    actual[0] = [0, 1, 0]
    manifest = replace(int8_artifact.manifest, outputs=("logits",), labels=("a", "b", "c"))
    assert measure(manifest, expected, actual) == {"label_agreement": 0.75}


def test_rows_of_a_reranker_are_queries_with_twenty_documents(int8_artifact: Artifact) -> None:
    tokenizer = Tokenizer.from_buffer(int8_artifact.read(TOKENIZER))
    texts = [f"w{index}" for index in range(5, 55)]
    manifest = replace(int8_artifact.manifest, outputs=("logits",), labels=("score",))
    rows = quality_rows(manifest, tokenizer, texts)
    pairs = [(texts[start], texts[start + 1 + i]) for start in (0, 21) for i in range(20)]
    assert rows.ids == [tokenizer.encode(*pair).ids for pair in pairs]
    assert quality_rows(int8_artifact.manifest, tokenizer, texts) == text_rows(
        int8_artifact.manifest, tokenizer, texts
    )


def length_quality(max_tokens: int, source: TextSource = "own", **measures: float) -> LengthQuality:
    return LengthQuality(
        source=source,
        min_tokens=max_tokens // 2 + 1,
        max_tokens=max_tokens,
        texts=50,
        measures=measures,
    )


def test_every_class_of_lengths_has_the_bounds() -> None:
    own = [
        length_quality(64, mean_cosine=0.999, recall_at_10=0.98),
        length_quality(128, mean_cosine=0.9949, recall_at_10=0.98),
        length_quality(256, mean_cosine=0.999, recall_at_10=0.9699),
    ]
    assert QualityBounds().find_broken(own) == [
        "mean_cosine of 65 to 128 tokens is 0.9949 (0.995 required)",
        "recall_at_10 of 129 to 256 tokens is 0.9699 (0.97 required)",
    ]
    assert lowest(own) == {"mean_cosine": 0.9949, "recall_at_10": 0.9699}
    generated = [length_quality(64, "generated", mean_cosine=0.9, recall_at_10=0.5)]
    assert QualityBounds().find_broken(own[:1] + generated) == [
        "mean_cosine of 33 to 64 tokens of generated texts is 0.9000 (0.995 required)"
    ]
    # Neighbours of generated texts are accidental.
    assert lowest(own[:1] + generated) == {"mean_cosine": 0.9, "recall_at_10": 0.98}
    assert lowest(generated) == {"mean_cosine": 0.9, "recall_at_10": 0.5}


@pytest.mark.parametrize("name", ["rank_correlation", "label_agreement"])
@pytest.mark.parametrize("source", ["joined", "generated"])
def test_other_texts_bound_scores_and_labels_without_texts_of_the_user(
    name: str, source: TextSource
) -> None:
    own = replace(length_quality(64), measures={name: 0.98})
    other = replace(own, source=source, measures={name: 0.9})
    assert QualityBounds().find_broken([own, other]) == []
    assert len(QualityBounds().find_broken([other])) == 1


def test_nan_is_below_every_bound_and_the_lowest_result() -> None:
    own = [length_quality(64, mean_cosine=value) for value in (0.999, float("nan"), 0.999)]
    broken = QualityBounds().find_broken(own)
    assert broken == ["mean_cosine of 33 to 64 tokens is nan (0.995 required)"]
    assert np.isnan(lowest(own)["mean_cosine"])


@given(st.integers(1, 10_000))
@settings(max_examples=200)
def test_classes_of_lengths_are_a_partition_up_to_the_maximum(max_tokens: int) -> None:
    classes = length_classes(max_tokens)
    assert [length for own in classes for length in own] == [*range(1, min(max_tokens, 2048) + 1)]
    assert all(own[-1] <= max(32, 2 * (own[0] - 1)) for own in classes)


def scripts_of(texts: Sequence[str]) -> set[str]:
    return {unicodedata.name(c, "").split(" ")[0] for text in texts for c in text if c.isalpha()}


@pytest.mark.parametrize("texts", [None, calibration_texts()], ids=["generated", "short texts"])
def test_calibration_has_all_lengths_and_all_scripts_of_the_vocabulary(
    small_artifact: Artifact, texts: list[str] | None
) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    manifest = small_artifact.manifest
    assert manifest.max_tokens == 256
    rows = calibration_rows(manifest, tokenizer, texts)
    assert max(map(len, rows.ids)) == 256
    assert 12_000 < sum(map(len, rows.ids)) <= 14_000
    for shortest, longest in ((1, 32), (33, 64), (65, 128), (129, 256)):
        lengths = [len(row) for row in rows.ids if shortest <= len(row) <= longest]
        assert 2_500 < sum(lengths) < 4_500, (shortest, longest)
        assert max(lengths) > 0.9 * longest, (shortest, longest)
    # A script has at least 20 letters of the vocabulary's words.
    words = [tokenizer.decode([index]) for index in range(tokenizer.get_vocab_size())]
    counts = {name: sum(name in scripts_of([word]) for word in words) for name in scripts_of(words)}
    common = {name for name, count in counts.items() if count >= 20}
    assert {"LATIN", "CYRILLIC", "ARABIC", "HANGUL", "CJK", "THAI"} < common
    assert common <= scripts_of([tokenizer.decode(row) for row in rows.ids])


def test_calibration_is_the_same_at_every_call(small_artifact: Artifact) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    texts = calibration_texts()
    first, second = (calibration_rows(small_artifact.manifest, tokenizer, texts) for _ in range(2))
    assert first == second


def test_other_texts_measure_than_calibrate(small_artifact: Artifact) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    tokenizer.no_truncation()
    first, second = (
        VocabularyTexts(tokenizer, seed).texts(range(20, 30), 100)[1] for seed in (0, 1)
    )
    assert not {*first} & {*second}


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=30),
    st.integers(3, 300),
    st.booleans(),
)
@settings(max_examples=25)
def test_rows_have_the_lengths_of_their_class(
    small_artifact: Artifact, sizes: list[int], max_tokens: int, is_reranker: bool
) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    tokenizer.no_truncation()
    # Words of one token each.
    texts = [
        " ".join(["cat", "dog", "the"][(i + j) % 3] for j in range(n)) for i, n in enumerate(sizes)
    ]
    manifest = replace(small_artifact.manifest, max_tokens=max_tokens)
    if is_reranker:
        manifest = replace(manifest, outputs=("logits",), labels=("score",))
    rows = rows_by_length(
        manifest,
        tokenizer,
        OwnTexts(tokenizer, texts, longest_text(manifest, tokenizer)),
        tokens=2000,
    )
    assert [own.lengths for own in rows] == length_classes(max_tokens)
    special = 3 if is_reranker else 2
    for own in rows:
        lengths = own.lengths
        assert len(own.rows.ids) >= 20
        for ids in own.rows.ids:
            assert min(lengths[0], special + 1) <= len(ids) <= lengths[-1]
            # The two texts of a pair have half of the tokens each, rounded down.
            assert len(ids) >= lengths[0] - is_reranker or lengths[-1] <= special + 2


def test_texts_of_the_right_length_are_not_joined(small_artifact: Artifact) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    tokenizer.no_truncation()
    texts = [f"cat {' dog' * index}" for index in range(100)]
    corpus = OwnTexts(tokenizer, texts, longest=254)
    assert corpus.texts(range(10, 21), 11) == ("own", texts[9:20])
    source, some = corpus.texts(range(1, 101), 25)
    assert (source, len(some)) == ("own", 25)
    assert {*some} < {*texts}
    assert corpus.texts(range(1, 101), 500) == ("own", texts)
    assert corpus.texts(range(30, 61), 500)[0] == "joined"
    source, (joined,) = corpus.texts(range(200, 255), 1)
    assert source == "joined"
    assert len(tokenizer.encode(joined, add_special_tokens=False).ids) >= 254
    # Longer texts than the model reads are of the greatest length.
    assert OwnTexts(tokenizer, texts, longest=20).texts(range(11, 21), 90) == ("own", texts[10:])


def test_texts_without_tokens_are_refused(small_artifact: Artifact) -> None:
    tokenizer = Tokenizer.from_buffer(small_artifact.read(TOKENIZER))
    with pytest.raises(CheckpointError, match="finds no tokens in the calibration texts"):
        OwnTexts(tokenizer, ["\u200b", "\u200b\u200b"], 256)


def test_vocabulary_without_words_is_refused() -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "1": 1, "!": 2}, unk_token="[UNK]"))  # noqa: S106
    with pytest.raises(CheckpointError, match="the vocabulary has no words"):
        VocabularyTexts(tokenizer, seed=0)


def test_flags_are_those_of_cpuinfo(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("model name\t: A\nflags\t\t: fpu avx512_vnni\n\n")
    assert cpu_flags(tmp_path) == {"fpu", "avx512_vnni"}
    assert cpu_flags(tmp_path / "elsewhere") == frozenset()


@needs_int8
@pytest.mark.parametrize(("flags", "hint"), [({"avx512_vnni"}, "bf16"), ({"amx_tile"}, "f32")])
def test_values_between_int8_products_are_in_bfloat16_except_with_amx(
    int8_artifact: Artifact, monkeypatch: pytest.MonkeyPatch, flags: set[str], hint: str
) -> None:
    hints: list[str] = []

    def compile_model(_self: object, _model: object, _cpu: str, options: dict[str, str]) -> None:
        hints.append(options["INFERENCE_PRECISION_HINT"])
        raise InterruptedError

    monkeypatch.setattr(
        "models.engines.with_openvino.cpu_flags", lambda: {"avx512_vnni", "avx512_bf16", *flags}
    )
    monkeypatch.setattr("openvino.Core.get_property", lambda *_: ["FP32", "INT8", "BF16"])
    monkeypatch.setattr("openvino.Core.compile_model", compile_model)
    with pytest.raises(EngineError, match="InterruptedError"):
        open_engine(int8_artifact, "openvino", "int8")
    assert hints == [hint]


def test_cpu_without_vnni_is_refused(
    small_folder: Path,
    tmp_path: Path,
    int8_artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("models.engines.with_openvino.cpu_flags", lambda: {"avx2"})
    with pytest.raises(EngineError, match="openvino in int8 is not usable: this CPU has no AVX512"):
        open_engine(int8_artifact, "auto", "int8")
    arguments = [str(small_folder), "--out", str(tmp_path / "out"), "--precision=int8"]
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "the quality of int8 cannot be measured on this machine: this CPU has" in captured.err
    assert not captured.out


@needs_int8
def test_artifact_without_int8_graph_names_the_option(small_artifact: Artifact) -> None:
    with pytest.raises(EngineError, match="no graph for openvino in int8; export it with --prec"):
        open_engine(small_artifact, "openvino", "int8")


@pytest.fixture
def arguments_of_int8(tmp_path: Path) -> list[str]:
    """Arguments that export a model of 24 tokens in int8, whose quality is measured in no time."""
    save_checkpoint(tmp_path / "model", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    return [str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--precision=int8"]


@pytest.mark.parametrize(
    ("output", "own", "others"),
    [
        ("pooled", {"min_cosine": 0.5, "min_recall": 0.5}, ("min_rank_correlation",)),
        ("logits", {"min_rank_correlation": 0.5}, ("min_cosine", "min_recall")),
    ],
)
def test_bounds_of_other_outputs_are_refused(
    output: Output, own: dict[str, float], others: tuple[str, ...], small_artifact: Artifact
) -> None:
    manifest = replace(small_artifact.manifest, outputs=(output,))
    check_outputs(manifest, QualityBounds(**own))
    for name in others:
        option = f"--{name.replace('_', '-')}"
        with pytest.raises(
            CheckpointError, match=f"{option} does not apply .* the output {output}"
        ):
            check_outputs(manifest, QualityBounds(**{name: 0.5}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--min-recall=0.5"], "--min-recall and --min-rank-correlation are for --precision int8"),
        (["--precision=int8", "--min-recall=0.99"], "--min-recall is for texts of --calibrate"),
        *(
            (["--precision=int8", f"--min-recall={bound}"], "--min-recall must be from 0 to 1")
            for bound in ("nan", "-0.1", "1.1")
        ),
    ],
)
def test_bounds_that_cannot_be_measured_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err


@needs_int8
def test_quality_below_a_bound_fails_and_names_the_costliest_layers(
    arguments_of_int8: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments_of_int8, "--min-cosine=1"]) == 1
    captured = capsys.readouterr()
    assert "Calibrating int8 with texts from the vocabulary\n" in captured.out
    assert "below the bounds even with 1 of 4 layers in float: mean_cosine of 1 to" in captured.err
    assert "layers.0.linear2" in captured.err
    assert not (tmp_path / "out").exists()


@needs_int8
def test_command_line_prints_quality_and_costs(
    small_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(calibration_texts()))
    arguments = [str(small_folder), "--out", str(tmp_path / "out"), f"--calibrate={file}"]
    assert main([*arguments, "--precision=int8", "--min-recall=0"]) == 0
    out = capsys.readouterr().out
    assert "Calibrating int8 with texts from --calibrate and the vocabulary\n" in out
    quality = int8_graph(Artifact.load(tmp_path / "out")).quality
    assert quality is not None
    sources = ("own ", "joined ", "generated ")
    lengths = ["1-32", "33-64", "65-128", "129-256"]
    printed = [line.split() for line in out.splitlines() if line.startswith(sources)]
    assert [line[:2] for line in printed] == [
        *([source, own] for source, own in zip(["own", *["joined"] * 3], lengths, strict=True)),
        *(["generated", own] for own in lengths),
    ]
    for line, own in zip(printed, quality.by_length, strict=True):
        assert [*map(float, line[3:])] == pytest.approx([*own.measures.values()], abs=6e-5)
    assert quality.measures == lowest(quality.by_length)
    assert quality.evaluated_texts == sum(own.texts for own in quality.by_length)
    assert list(quality.costs.values()) == sorted(quality.costs.values(), reverse=True)
    assert {f"layers.{i}.self_attn.in_proj" for i in range(2)} < quality.costs.keys()
    assert not quality.is_generated


@needs_int8
def test_export_refuses_a_graph_whose_check_is_below_the_bound(
    arguments_of_int8: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spec = OUTPUTS["pooled"]
    bounds = {**spec.bounds, "int8": Agreement(1.1, 0.1)}
    monkeypatch.setitem(OUTPUTS, "pooled", replace(spec, bounds=bounds))
    assert main([*arguments_of_int8, "--min-cosine=0"]) == 1
    captured = capsys.readouterr()
    sentence = r"worst cosine of the check's pooled is \d\.\d{4} \(1\.1 required\), and their worst"
    assert re.search(sentence, captured.err)
    assert not (tmp_path / "out").exists()


@needs_int8
def test_output_without_a_measure_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_masked_lm(tmp_path / "model", "bert", num_hidden_layers=1)
    save_tokenizer(tmp_path / "model")
    arguments = [str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--sparse"]
    assert main([*arguments, "--precision=int8"]) == 1
    assert "the quality of sparse is not measured" in capsys.readouterr().err
