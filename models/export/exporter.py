"""Export of a model: write its artifact, and compare the graphs with PyTorch."""

import copy
import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from tokenizers import Tokenizer

from models.artifact import Artifact, hashes, new_folder, sha256, write_check, write_manifest
from models.engines import ENGINES, EngineError, Precision
from models.engines.engine import how_to_install
from models.export.calibration import calibrate, distinct
from models.export.checkpoint import NO_OVERRIDES, load
from models.export.gliner_rows import check_row, least_tokens
from models.export.int8.graph import add_int8_graph
from models.export.int8.quality import QualityBounds, check_outputs
from models.export.model_card import license_of
from models.export.model_folder import CheckpointError, ModelFolder
from models.export.onnx_graph import OPSET, VERSIONS, graph_for, trace, write_weights
from models.export.pair_template import template_of_hub
from models.export.parity import (
    Parity,
    ParityCase,
    adapters_in_turn,
    measure_parity,
    reference_cases,
    reference_outputs,
    unattended_in_turn,
)
from models.export.query_table import QueryTable, read_query_table
from models.export.requirements import check_requirements
from models.export.sentence_config import Overrides, SentenceConfig
from models.export.sources import CheckpointSource
from models.export.static import is_static, read_static
from models.export.static_artifact import static_cases, static_check, static_manifest
from models.export.token_rules import check_room_for_texts, hybrid_rules, token_rules
from models.export.tokenizer_file import read_tokenizer
from models.manifest import (
    CALIBRATION,
    EMBEDDINGS,
    QUERY_WEIGHTS,
    SOURCE,
    TOKENIZER,
    ArtifactError,
    Check,
    Graph,
    Manifest,
    SpanRules,
    TokenRules,
)
from models.network.sentence_encoder import SentenceEncoder
from models.packing import NO_ADAPTER
from models.quantization import write_calibration

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
# File name of each engine's graph. Graphs are compared with PyTorch in this order. OpenVINO is
# first, because it takes the most memory and releases it.
_GRAPHS = {
    "openvino": "model.openvino.onnx",
    "onnxruntime": "model.onnx",
    "cuda": "model.cuda.onnx",
}
_WEIGHTS = {"cpu": "model.weights", "cuda": "model.cuda.weights"}

# Inputs of the self-check. Each covers a different source of errors: a single token, a sentence,
# punctuation, emoji, non-Latin scripts, code, a long text, and a text that is truncated.
_CHECK_TEXTS = (
    "a",
    "The cat sat on the mat.",
    'Wait -- what?! (No; really: "yes".) #1/2 & 50% ~ <tag> [x] {y} \\ |',
    "🎉🚀 done 👩‍💻 ❤️",
    "Ünïcödé, naïve café, Straße; русский текст; 日本語の文章; العربية; हिन्दी",
    "def f(x):\n    return x ** 2  # square",
    "one two three four five six seven eight nine ten " * 4,
    "the quick brown fox jumps over the lazy dog and runs away " * 200,
)
# Maximum length of a check input, in tokens, because every start of the service runs all of them.
_MAX_CHECK_TOKENS = 512
# Hub ids of models whose pooling excludes prompts, although their files do not say so. Source:
# `SentenceTransformer.__init__` of sentence-transformers 6.2, which goes by these names too.
_INSTRUCTOR = ("hkunlp/instructor-base", "hkunlp/instructor-large", "hkunlp/instructor-xl")
# Number of leading check inputs whose token vectors or multi-vectors are stored (0.2 MB).
_TOKEN_ROWS = 3


def export(
    source: CheckpointSource,
    out: Path,
    *,
    dtype: Precision = "float32",
    target: str = "cpu",
    overrides: Overrides = NO_OVERRIDES,
    copy_source: bool = True,
    calibration_texts: Sequence[str] | None = None,
    int8: QualityBounds | None = None,
    key: EllipticCurvePrivateKey | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> tuple[Artifact, list[Parity]]:
    """Write the artifact of `source` to the directory `out`.

    Args:
        source: Model folder and its origin.
        out: Directory to create.
        dtype: Dtype of the weights in the graph for "cuda": "float32" or "float16".
        target: "cpu", or "cuda" to export a graph for GPUs in addition to those for CPUs.
        overrides: Replacements for the model's settings.
        copy_source: Whether to copy the weights and config, which the gradient routes need.
        calibration_texts: Texts that calibrate quantised vectors and, with texts from the
            vocabulary, the int8 graph; None: no calibration of vectors, and texts from the
            vocabulary alone for the int8 graph.
        int8: Lowest acceptable quality of an int8 graph; None: no int8 graph.
        key: Private key that signs the artifact, see `models.signing`; None: it is not signed.
        report: Called with a progress message at each step.

    Returns:
        The artifact, and the parity with PyTorch of every graph with a usable engine.

    Raises:
        CheckpointError: The model is invalid or unsupported, or has no output "pooled" to
            calibrate, or an output whose quality in int8 is not measured, or experts, which need
            float32.
        ArtifactError: `out` already exists, or `dtype` is "float16" and `target` is "cpu", or there
            are too few texts that calibrate, or a static model has another target or precision.
        EngineError: The vectors of a graph differ from PyTorch's beyond the bounds in
            `models.engines.OUTPUTS`, or the quality of the int8 graph is below its bounds, or int8
            is not usable on this machine.
    """
    if int8 and (reason := ENGINES["openvino"].unusable("int8")):
        raise EngineError(f"the quality of int8 cannot be measured on this machine: {reason}")
    if (dtype, target) == ("float16", "cpu"):
        raise ArtifactError("--dtype float16 needs --target cuda; CPU engines need float32")
    texts = None if calibration_texts is None else distinct(calibration_texts)
    dtypes: dict[str, Precision] = {"cpu": "float32", target: dtype}
    started = time.monotonic()
    report(f"Reading {source.name}")
    files = ModelFolder(source.folder)
    check_requirements(files)
    terms = license_of(ModelFolder(source.folder), report)  # what it reads is not copied to source/
    if is_static(files):
        return _export_static(
            source, files, out, dtypes, overrides, texts, int8, key, terms, report
        )
    model, config = load(files, _with_hub_settings(overrides, files, source.source), report)
    if model.encoder.config.experts and (int8 or dtype != "float32"):
        option = "--precision int8" if int8 else f"--dtype {dtype}"
        raise CheckpointError(
            f"{option} is not for models with experts (num_experts): rounding lets tokens choose "
            "other experts"
        )
    if texts is not None and not int8:
        _check_has_pooled(source.name, config)
    tokenizer = read_tokenizer(files, config, model.encoder.config.vocab_size)
    table = read_query_table(files, config, tokenizer, model.encoder.config.vocab_size)
    rules = _rules(model, tokenizer, config, table)
    _check_room(tokenizer, config, rules)
    with new_folder(out) as folder:
        tokenizer.save(str(folder / TOKENIZER))
        if table:
            np.save(folder / QUERY_WEIGHTS, table.weights.numpy())
        check = _check(model, tokenizer, config)
        write_check(folder, check)
        if copy_source:
            _copy(files, folder / SOURCE)
        graphs: list[Graph] = []
        for target, graph_dtype in dtypes.items():
            report(f"Exporting {model.encoder.config.num_layers} layers for {target}")
            graphs += _write_graphs(model, target, graph_dtype, folder)
        manifest = _manifest(source, files, model, config, rules, graphs, hashes(folder), terms)
        write_manifest(folder, manifest)
        if int8:
            check_outputs(manifest, int8)
        report("Computing PyTorch's vectors")
        cases = reference_cases(model, config.max_tokens, check)
        del model  # frees memory for the engines; gc frees the exporter's reference cycles
        gc.collect()
        parity = _compare(cases, graphs, folder, report)
        manifest = replace(manifest, graphs=tuple(_with_parity(g, parity) for g in graphs))
        write_manifest(folder, manifest)
        manifest = _calibrate(Artifact(folder, manifest), tokenizer, texts, int8, report)
        _sign(folder, key, out.name, report)
    report(f"Wrote {out} in {time.monotonic() - started:.0f} s")
    return Artifact(out, manifest), parity


def _compare(
    cases: Sequence[ParityCase],
    graphs: Sequence[Graph],
    folder: Path,
    report: Callable[[str], None],
) -> list[Parity]:
    """Compare the graphs with PyTorch whose engines are usable on this machine."""
    parity: list[Parity] = []
    for graph in graphs:
        precision: Precision = "float32" if graph.dtype == "float32" else "float16"
        if ENGINES[graph.engine].unusable(precision) is None:
            report(f"Comparing the graph for {graph.engine} with PyTorch")
            parity += measure_parity(cases, Artifact.load(folder), graph.engine, precision)
    return parity


def _export_static(
    source: CheckpointSource,
    files: ModelFolder,
    out: Path,
    dtypes: Mapping[str, Precision],
    overrides: Overrides,
    texts: Sequence[str] | None,
    int8: QualityBounds | None,
    key: EllipticCurvePrivateKey | None,
    terms: str | None,
    report: Callable[[str], None],
) -> tuple[Artifact, list[Parity]]:
    """Write the artifact of a static model; see `export`. It has no source: it has no gradients."""
    if int8 or dtypes.keys() != {"cpu"}:
        raise ArtifactError("a static model has no network: it is exported in float32, for CPUs")
    model = read_static(files, overrides)
    rules = {"": model.rules}
    check_room_for_texts(model.tokenizer, model.prompts, rules, model.truncation_side)
    with new_folder(out) as folder:
        model.tokenizer.save(str(folder / TOKENIZER))
        np.save(folder / EMBEDDINGS, model.table.numpy())
        check = static_check(model, _CHECK_TEXTS, _MAX_CHECK_TOKENS)
        write_check(folder, check)
        manifest = static_manifest(source, files, model, hashes(folder), VERSIONS, terms)
        write_manifest(folder, manifest)
        parity = _compare(static_cases(model, check), manifest.graphs, folder, report)
        manifest = replace(manifest, graphs=(_with_parity(manifest.graphs[0], parity),))
        write_manifest(folder, manifest)
        manifest = _calibrate(Artifact(folder, manifest), model.tokenizer, texts, None, report)
        _sign(folder, key, out.name, report)
    report(f"Wrote {out}")
    return Artifact(out, manifest), parity


def _calibrate(
    artifact: Artifact,
    tokenizer: Tokenizer,
    texts: Sequence[str] | None,
    int8: QualityBounds | None,
    report: Callable[[str], None],
) -> Manifest:
    """Add what texts calibrate to an artifact, and return its manifest; see `export`."""
    folder, manifest = artifact.path, artifact.manifest
    if texts is not None and "pooled" in manifest.outputs:
        report(f"Calibrating with {len(texts):,} texts")
        write_calibration(folder, calibrate(artifact, tokenizer, texts))
        digest = sha256(folder / CALIBRATION)
        manifest = replace(manifest, files={**manifest.files, CALIBRATION: digest})
        write_manifest(folder, manifest)
    if int8 is None:
        return manifest
    source = "the vocabulary" if texts is None else "--calibrate and the vocabulary"
    report(f"Calibrating int8 with texts from {source}")
    artifact = replace(artifact, manifest=manifest)
    return add_int8_graph(artifact, tokenizer, texts, int8, report).manifest


def _sign(
    folder: Path,
    key: EllipticCurvePrivateKey | None,
    name: str,
    report: Callable[[str], None],
) -> None:
    """Sign a complete artifact before it gets its place, with the name that it has there."""
    if key is not None:
        report(f"Signed by the key {Artifact.load(folder).sign(key, name)}")


def _check_has_pooled(name: str, config: SentenceConfig) -> None:
    if "pooled" not in config.outputs:
        raise CheckpointError(
            f"--calibrate needs a model with the output pooled; {name} has "
            f"{', '.join(config.outputs)}"
        )


def _with_hub_settings(overrides: Overrides, files: ModelFolder, source: str) -> Overrides:
    """Return the overrides with the settings of a hub model that its files do not have."""
    if overrides.include_prompt is None and source in _INSTRUCTOR:
        overrides = replace(overrides, include_prompt=False)
    if overrides.pair_template is None and not files.has("modules.json"):
        overrides = replace(overrides, pair_template=template_of_hub(source))
    return overrides


def _check_room(
    tokenizer: Tokenizer, config: SentenceConfig, rules: Mapping[str, TokenRules]
) -> None:
    """Raise CheckpointError if template, labels or prompt of a row leave no room for a text."""
    if config.spans and (least := least_tokens(tokenizer, config.spans.rules)) > config.max_tokens:
        raise CheckpointError(
            f"--max-tokens {config.max_tokens} leaves no room for labels and a text; at least "
            f"{least} is required"
        )
    if (template := config.pair_template) is None:
        rules = {"": TokenRules(max_tokens=config.max_tokens), **rules}
        check_room_for_texts(tokenizer, config.prompts, rules, config.truncation_side)
        return
    texts = [template.prefix, *template.body("", "", ""), template.suffix]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    if (own := sum(map(len, encodings))) >= config.max_tokens:
        raise CheckpointError(
            f"the template of pairs has {own} tokens; the model's maximum is {config.max_tokens}"
        )


def _rules(
    model: SentenceEncoder, tokenizer: Tokenizer, config: SentenceConfig, table: QueryTable | None
) -> dict[str, TokenRules]:
    if table:
        return table.rules
    if config.multi:
        return token_rules(config.multi, tokenizer, config.max_tokens, model.encoder.config)
    if {"weights", "multi"} & {*config.outputs}:
        return {"": hybrid_rules(config, tokenizer)}
    return {}


def _write_graphs(
    model: SentenceEncoder, target: str, dtype: Precision, folder: Path
) -> list[Graph]:
    """Write the graphs of a target's engines, and the weights that the graphs share."""
    exact = dtype == "float32"
    if not exact:
        heads = copy.deepcopy((model.heads, model.token_heads, model.sparse, model.spans))
        model = copy.deepcopy(model).to(DTYPES[dtype])
        # Heads stay in float32: in float16, the sigmoids of high logits would be equal.
        model.heads, model.token_heads, model.sparse, model.spans = heads
    graph = trace(model, target)
    write_weights(graph, folder / _WEIGHTS[target])
    graphs: list[Graph] = []
    for engine, file in _GRAPHS.items():
        if ENGINES[engine].target == target:
            (folder / file).write_bytes(graph_for(engine, graph))
            graphs.append(
                Graph(
                    file=file,
                    weights=_WEIGHTS[target],
                    engine=engine,
                    dtype=dtype,
                    opset=OPSET,
                    parity=None,
                )
            )
    return graphs


def _with_parity(graph: Graph, parity: Sequence[Parity]) -> Graph:
    lines = [line for line in parity if line.engine == graph.engine]
    if not lines:
        return graph
    worst = {
        "worst_cosine": min(line.worst_cosine for line in lines),
        "worst_norm": max(line.worst_norm for line in lines),
        "max_abs": max(line.max_abs for line in lines),
    }
    return replace(graph, parity=worst)


def _check(model: SentenceEncoder, tokenizer: Tokenizer, config: SentenceConfig) -> Check:
    limit = min(config.max_tokens, _MAX_CHECK_TOKENS)
    tokenizer.enable_truncation(limit, direction=config.truncation_side)
    texts = list(_CHECK_TEXTS)
    if config.spans:
        return _check_of_spans(model, tokenizer, config.spans.rules, texts)
    # Half of a sequence classifier's inputs are pairs of texts.
    reads_pairs = "logits" in model.outputs
    pairs = list(zip(texts, reversed(texts), strict=True))[::2] if reads_pairs else []
    inputs: list[Any] = [*texts[1::2], *pairs] if pairs else texts
    encodings = tokenizer.encode_batch(inputs)
    tokenizer.no_truncation()
    # The service refuses texts without tokens.
    inputs = [text for text, own in zip(inputs, encodings, strict=True) if own.ids]
    encodings = [own for own in encodings if own.ids]
    if not encodings:
        raise CheckpointError("the tokenizer finds no tokens in common texts")
    rows = [encoding.ids for encoding in encodings]
    types = [encoding.type_ids for encoding in encodings] if model.has_token_types else []
    adapters, unattended = adapters_in_turn(model, len(rows)), unattended_in_turn(model, rows)
    results = reference_outputs(model, rows, None, adapters, types or None, unattended)
    outputs: dict[str, list[list[float]]] = {
        output: [
            [x or 0 for x in vector]  # zeros of sparse vectors are shorter as integers
            for result in results[: _TOKEN_ROWS if output in ("tokens", "multi") else None]
            for vector in result[output].tolist()
        ]
        for output in model.outputs
    }
    return Check(rows, outputs, [] if pairs else inputs, adapters, types, unattended)


def _check_of_spans(
    model: SentenceEncoder, tokenizer: Tokenizer, rules: SpanRules, texts: Sequence[str]
) -> Check:
    """Return the self-check of a model that reads labels; the tokenizer truncates its inputs."""
    inputs = [check_row(tokenizer, rules, text) for text in texts]
    tokenizer.no_truncation()
    rows, words, labels = map(list, zip(*inputs, strict=True))
    results = reference_outputs(model, rows, words=words, labels=labels)
    spans = [vector for result in results for vector in result["spans"].tolist()]
    return Check(
        rows=rows,
        outputs={"spans": spans},
        texts=[],
        adapters=[NO_ADAPTER] * len(rows),
        token_types=[],
        unattended=[0] * len(rows),
        words=tuple(words),
        labels=tuple(labels),
    )


def _copy(files: ModelFolder, target: Path) -> None:
    """Copy the files that the export has read, which are all that the reference model needs."""
    for name in files.files_read:
        destination = target / name
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files.locate(name), destination)


def _manifest(
    source: CheckpointSource,
    files: ModelFolder,
    model: SentenceEncoder,
    config: SentenceConfig,
    rules: Mapping[str, TokenRules],
    graphs: Sequence[Graph],
    file_hashes: Mapping[str, str],
    terms: str | None,
) -> Manifest:
    return Manifest(
        name=source.name,
        source=source.source,
        revision=source.revision,
        family=config.family,
        weights_sha256={name: sha256(files.locate(name)) for name in files.weights},
        outputs=model.outputs,
        labels=config.labels,
        activation=config.activation,
        width=model.width,
        hidden_size=model.encoder.config.d_model,
        windows=model.encoder.config.windows,
        vocab_size=model.encoder.config.vocab_size,
        max_tokens=config.max_tokens,
        pooling=config.pooling,
        heads=tuple(type(head).__name__ for head in model.heads),
        include_prompt=config.include_prompt,
        normalize=config.normalize,
        similarity=config.similarity,
        matryoshka_dimensions=tuple(n for n in config.matryoshka_dimensions if n <= model.width),
        truncation_side=config.truncation_side,
        prompts=config.prompts,
        default_prompt=config.default_prompt,
        adapters=model.encoder.config.adapters.names if model.encoder.config.adapters else (),
        token_rules=rules,
        graphs=tuple(graphs),
        files=file_hashes,
        versions={**VERSIONS, **_engine_versions()},
        pair_template=config.pair_template,
        spans=config.spans.rules if config.spans else None,
        has_experts=model.encoder.config.experts is not None,
        license=terms,
        unknown_id=config.unknown_id,
        baseline_ids=config.baseline_ids,
        prompt_adapters=config.prompt_adapters,
    )


def _engine_versions() -> dict[str, str]:
    if how_to_install("onnxruntime", "cpu"):
        return {}
    # Imported late, because `models.engines` must disable onnxruntime's telemetry first.
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__}
