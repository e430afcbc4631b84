"""`vitrine-export`: a model folder, package or hub id to an artifact, checked against PyTorch."""

import argparse
import copy
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.artifact import (
    TOKENIZER,
    TWIN,
    Artifact,
    ArtifactError,
    Check,
    Graph,
    Manifest,
    hashes,
    sha256,
    write_check,
    write_manifest,
    writing,
)
from models.checkpoint import NO_OVERRIDES, load
from models.engines import (
    ENGINES,
    SELF_CHECK_COSINE,
    EngineError,
    Precision,
    cosines,
    open_engine,
    self_check,
)
from models.model_folder import CheckpointError, ModelFolder
from models.onnx_graph import OPSET, TARGETS, VERSIONS, build_graph
from models.packing import pack
from models.pooling import POOLINGS
from models.recipe import Overrides, Recipe
from models.sentence_encoder import SentenceEncoder
from models.sources import Source, SourceError, resolve
from models.tokenizer_file import read_tokenizer

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
_FILES = {"cpu": "model.onnx", "cuda": "model.cuda.onnx"}

# The one place where this package meets text: the inputs of the self-check, stored as token ids.
# One of each kind that goes wrong on its own: a word, punctuation, emoji, scripts, full length.
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


@dataclass(frozen=True)
class Parity:
    """How far a graph's vectors are from PyTorch's, over one group of rows."""

    target: str
    case: str
    rows: int
    worst_cosine: float
    max_abs: float


def export(
    source: Source,
    out: Path,
    *,
    dtype: Precision = "float32",
    target: str = "cpu",
    overrides: Overrides = NO_OVERRIDES,
    twin: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Artifact, list[Parity]]:
    """Write the artifact of `source` to the directory `out`.

    Args:
        source: The model's files.
        out: Must not be there yet.
        dtype: Of the weights of the graph for "cuda", "float32" or "float16".
        target: "cpu"; or "cuda" for a graph for it beside the one for "cpu".
        overrides: Take the place of what the model's files say.
        twin: Whether to copy the weights, which gradient work reads.
        say: Told of each step.

    Returns:
        The artifact, and the parity with PyTorch of the graphs that an engine here runs.

    Raises:
        CheckpointError: The model is not understood.
        ArtifactError: `out` is there already, or the model cannot be one file.
        EngineError: A graph does not agree with PyTorch.
    """
    if (dtype, target) == ("float16", "cpu"):
        raise ArtifactError("float16 is for --target cuda; CPU engines take the float32 graph")
    dtypes: dict[str, Precision] = {"cpu": "float32", target: dtype}
    started = time.monotonic()
    say(f"Reading {source.name}")
    files = ModelFolder(source.folder)
    model, recipe = load(files, overrides)
    tokenizer = read_tokenizer(files, recipe, model.encoder.config.vocab_size)
    _check_size(model)
    with writing(out) as folder:
        tokenizer.save(str(folder / TOKENIZER))
        check = _check(model, tokenizer, recipe.max_tokens)
        write_check(folder, check)
        if twin:
            _copy(files, folder / TWIN)
        graphs = tuple(
            Graph(file=_FILES[target], target=target, dtype=dtype, opset=OPSET, parity=None)
            for target, dtype in dtypes.items()
        )
        for graph in graphs:
            say(f"Exporting {model.encoder.config.num_layers} layers for {graph.target}")
            exact = graph.dtype == "float32"
            weights = model if exact else copy.deepcopy(model).to(DTYPES[dtype])
            (folder / graph.file).write_bytes(build_graph(weights, graph.target))
        manifest = _manifest(source, files, model, recipe, graphs, hashes(folder))
        write_manifest(folder, manifest)
        parity: list[Parity] = []
        for graph in graphs:
            if engine := _engine_for(graph):
                say(f"Comparing the graph for {graph.target} with PyTorch")
                parity += measure_parity(model, Artifact.load(folder), engine, dtypes[graph.target])
        manifest = replace(manifest, graphs=tuple(_with_parity(g, parity) for g in graphs))
        write_manifest(folder, manifest)
    say(f"Wrote {out} in {time.monotonic() - started:.0f} s")
    return Artifact(out, manifest), parity


def _check_size(model: SentenceEncoder) -> None:
    size = sum(parameter.nbytes for parameter in model.parameters())
    if size >= onnx.checker.MAXIMUM_PROTOBUF:
        raise ArtifactError(
            f"the weights take {size / 2**30:.1f} GiB; one ONNX file holds less than 2 GiB"
        )


def _engine_for(graph: Graph) -> str | None:
    """Return an engine that runs the graph here as exactly as it was exported."""
    for name, entry in ENGINES.items():
        for precision, dtype in entry.precisions.items():
            if (entry.target, precision, dtype) == (graph.target, graph.dtype, graph.dtype):
                return None if entry.unusable(precision) else name
    return None


def measure_parity(
    model: SentenceEncoder, artifact: Artifact, name: str, precision: Precision
) -> list[Parity]:
    """Return how a graph, as its engine runs it, compares with PyTorch run on each row alone.

    Args:
        model: In float32.
        artifact: Exported from it.
        name: Of the engine.
        precision: What that computes in.

    Raises:
        EngineError: A vector is further from PyTorch's than the engine's precision explains.
    """
    engine = open_engine(artifact, name, precision)
    self_check(engine, artifact)
    rng = np.random.default_rng(0)
    longest = artifact.manifest.max_tokens
    lengths = [2, 3, 5, 8, 13, 21, 34, 64, longest // 2, longest - 1, longest]
    rows = [
        rng.integers(0, artifact.manifest.vocab_size, min(length, longest)).tolist()
        for length in lengths
    ]
    check = artifact.check()
    expected = _vectors(model, rows)  # (B, D)
    # As after a prompt that pooling leaves out, where a row is long enough for one.
    unpooled = [len(row) // 4 for row in rows]
    order = rng.permutation(len(rows))
    cases = {
        "check inputs": (engine.run(pack(check.rows)), np.asarray(check.vectors, np.float32)),
        "each row alone": (np.concatenate([engine.run(pack([row])) for row in rows]), expected),
        "one batch": (engine.run(pack(rows)), expected),
        "one batch, shuffled": (engine.run(pack([rows[i] for i in order])), expected[order]),
        "pooled in part": (engine.run(pack(rows, unpooled)), _vectors(model, rows, unpooled)),
    }
    parity = [
        Parity(
            target=ENGINES[name].target,
            case=case,
            rows=len(found),
            worst_cosine=float(cosines(found, wanted).min()),
            max_abs=float(np.abs(found - wanted).max()),
        )
        for case, (found, wanted) in cases.items()
    ]
    for line in parity:
        if not line.worst_cosine >= SELF_CHECK_COSINE[engine.precision]:
            raise EngineError(
                f"the graph does not agree with PyTorch ({line.case}): worst cosine "
                f"{line.worst_cosine:.7f}"
            )
    return parity


def _with_parity(graph: Graph, parity: Sequence[Parity]) -> Graph:
    lines = [line for line in parity if line.target == graph.target]
    if not lines:
        return graph
    worst = {
        "worst_cosine": min(line.worst_cosine for line in lines),
        "max_abs": max(line.max_abs for line in lines),
    }
    return replace(graph, parity=worst)


def _vectors(
    model: SentenceEncoder, rows: list[list[int]], unpooled: list[int] | None = None
) -> NDArray[np.float32]:
    """PyTorch's vectors `(B, D)`, each row dense and alone: nothing is packed or padded."""
    vectors: list[torch.Tensor] = []
    for row, skipped in zip(rows, unpooled or [0] * len(rows), strict=True):
        ones = torch.ones(1, len(row))
        pooled = (torch.arange(len(row)) >= skipped).float()[None]
        with torch.no_grad():
            vectors.append(model(torch.tensor([row]), ones, pooled)[0])
    return torch.stack(vectors).numpy()


def _check(model: SentenceEncoder, tokenizer: Tokenizer, max_tokens: int) -> Check:
    tokenizer.enable_truncation(max_tokens)
    rows = [encoding.ids for encoding in tokenizer.encode_batch(list(_CHECK_TEXTS))]
    tokenizer.no_truncation()
    return Check(rows, _vectors(model, rows).tolist())


def _copy(files: ModelFolder, twin: Path) -> None:
    """Copy what has been read, so that the twin loads as the source did."""
    for name in files.read:
        kept = twin / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(files.path / name, kept)


def _manifest(
    source: Source,
    files: ModelFolder,
    model: SentenceEncoder,
    recipe: Recipe,
    graphs: tuple[Graph, ...],
    written: Mapping[str, str],
) -> Manifest:
    return Manifest(
        name=source.name,
        source=source.source,
        revision=source.revision,
        family=recipe.family,
        weights_sha256={name: sha256(files.path / name) for name in files.weights},
        width=model.width,
        vocab_size=model.encoder.config.vocab_size,
        max_tokens=recipe.max_tokens,
        pooling=recipe.pooling,
        include_prompt=recipe.include_prompt,
        normalize=recipe.normalize,
        prompts=recipe.prompts,
        default_prompt=recipe.default_prompt,
        graphs=graphs,
        files=written,
        versions={**VERSIONS, "onnxruntime": onnxruntime.__version__},
    )


def _named_prompt(text: str) -> tuple[str, str]:
    name, equals, prompt = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("a prompt is NAME=TEXT")
    return name, prompt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="vitrine-export",
        description="Export a sentence encoder to an artifact that vitrine-serve serves.",
    )
    parser.add_argument("model", help="a folder, an installed model package, or a hub id")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default="cpu",
        help="cuda: with a graph for GPUs beside the one for CPUs",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the graph for GPUs (default: %(default)s)",
    )
    parser.add_argument("--pooling", choices=POOLINGS, help="instead of the model's own")
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="unit length or not, instead of the model's own",
    )
    parser.add_argument("--max-tokens", type=int, help="instead of the model's own")
    parser.add_argument(
        "--include-prompt",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether pooling counts a prompt's tokens, instead of the model's own",
    )
    parser.add_argument(
        "--prompt",
        metavar="NAME=TEXT",
        type=_named_prompt,
        action="append",
        default=[],
        help="a prompt beside the model's own, or instead of one; may be repeated",
    )
    parser.add_argument("--default-prompt", metavar="NAME", help="instead of the model's own")
    parser.add_argument(
        "--twin",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="copy the weights too, which gradient work reads (default: yes)",
    )
    options = parser.parse_args(arguments)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    overrides = Overrides(
        max_tokens=options.max_tokens,
        pooling=options.pooling and [options.pooling],
        include_prompt=options.include_prompt,
        normalize=options.normalize,
        prompts=dict(options.prompt),
        default_prompt=options.default_prompt,
    )
    try:
        if options.out.exists():
            raise ArtifactError(f"{options.out} is there already; remove it or choose another")
        artifact, parity = export(
            resolve(options.model, options.revision),
            options.out,
            dtype=options.dtype,
            target=options.target,
            overrides=overrides,
            twin=options.twin,
            say=lambda line: print(line, flush=True),
        )
    except (SourceError, CheckpointError, ArtifactError, EngineError, OSError) as error:
        print(f"vitrine-export: {error}", file=sys.stderr)
        return 1
    print(_table(parity))
    for graph in artifact.manifest.graphs:
        if graph.parity is None:
            print(f"The graph for {graph.target} is unverified: no engine here runs it.")
    return 0


def _table(parity: list[Parity]) -> str:
    lines = [f"{'Parity with PyTorch':26} {'rows':>5} {'worst cosine':>13} {'max |diff|':>11}"]
    lines += [
        f"{line.target:5} {line.case:20} {line.rows:5} {line.worst_cosine:13.9f} "
        f"{line.max_abs:11.1e}"
        for line in parity
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
