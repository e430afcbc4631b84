"""`vitrine-export`: export a Transformer encoder to an artifact for `vitrine-serve`."""

import argparse
import errno
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.artifact import folder_beside
from models.engines import EngineError
from models.local_path import local_path
from models.manifest import ArtifactError, Quality
from models.printable import printable

if TYPE_CHECKING:
    from models.export.int8.quality import QualityBounds
    from models.export.parity import Parity
    from models.quantization import Calibration

# Bounds of `QualityBounds`, with what they bound.
_BOUNDS = {
    "min_cosine": "mean cosine between int8 and float32 vectors of texts of similar length",
    "min_recall": "recall of the 10 nearest neighbours among texts of --calibrate of similar "
    "length",
    "min_rank_correlation": "rank correlation of scores, or share of equal labels",
}
# Number of layers that the export prints; the manifest has all.
_SHOWN_LAYERS = 8


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("it must be valid UTF-8") from None
    return text


def _named_prompt(text: str) -> tuple[str, str]:
    name, equals, prompt = _utf8(text).partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError("a prompt must have the form NAME=TEXT")
    return name, prompt


def _by_name(prompts: Sequence[tuple[str, str]], parser: argparse.ArgumentParser) -> dict[str, str]:
    by_name: dict[str, str] = {}
    for name, prompt in prompts:
        if name in by_name:
            parser.error(f"argument --prompt: two prompts have the name {name}")
        by_name[name] = prompt
    return by_name


def _parser() -> argparse.ArgumentParser:
    from models.add_layer_norm.onnx_nodes import TARGETS
    from models.export.calibration import MIN_TEXTS
    from models.export.exporter import DTYPES
    from models.export.int8.quality import QualityBounds
    from models.export.pair_template import CHOICES
    from models.network.pooling import POOLINGS

    parser = argparse.ArgumentParser(
        prog="vitrine-export",
        description="Export a Transformer encoder to an artifact for vitrine-serve.",
    )
    parser.add_argument(
        "model", help="model folder, installed model package, or Hugging Face hub id"
    )
    parser.add_argument(
        "--out",
        type=lambda text: local_path(_utf8(text)),  # onnxruntime opens no other paths
        required=True,
        help="directory to create for the artifact",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model (default: main)")
    parser.add_argument(
        "--target",
        choices=TARGETS,
        default="cpu",
        help="target hardware; cuda adds a graph for GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="dtype of the weights in the graph for GPUs (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=("float32", "int8"),
        default="float32",
        help="int8 adds a graph for OpenVINO on CPUs with AVX512-VNNI, and measures its quality "
        "(default: %(default)s)",
    )
    for name, what in _BOUNDS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=getattr(QualityBounds, name),
            help=f"with --precision int8: lowest acceptable {what}; below it, the export fails "
            "(default: %(default)s)",
        )
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="export the head for sparse vectors: of a masked language model, as in SPLADE, or for "
        "the weights of tokens, as in gte-multilingual-base",
    )
    parser.add_argument(
        "--tokens",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="output token vectors besides embeddings (default: yes, unless the model pools the "
        "first token alone; its last layer is then computed for that token only)",
    )
    parser.add_argument("--pooling", choices=POOLINGS, help="pooling mode (default: the model's)")
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="scale vectors to unit length (default: the model's setting)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="maximum input length in tokens, special tokens included (default: the model's)",
    )
    parser.add_argument(
        "--include-prompt",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="include prompt tokens in pooling (default: the model's setting)",
    )
    parser.add_argument(
        "--prompt",
        metavar="NAME=TEXT",
        type=_named_prompt,
        action="append",
        default=[],
        help="add a named prompt, or replace the model's prompt of that name; repeatable "
        "(default: the model's prompts)",
    )
    parser.add_argument(
        "--default-prompt",
        metavar="NAME",
        help="name of the default prompt (default: from the model's config)",
    )
    parser.add_argument(
        "--pair-template",
        choices=CHOICES,
        help="texts around query and document in a reranker based on a language model: a published "
        "template, the checkpoint's chat template, or none (default: by sentence-transformers' "
        "files, or by the hub id of a model with a published template)",
    )
    parser.add_argument(
        "--source",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="copy weights and config into the artifact, for the gradient routes (default: yes)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="TEXTS",
        type=local_path,
        help="UTF-8 file with the model's kind of texts, one per line: every second one gives the "
        "ranges of int8 and uint8 vectors and calibrates an int8 graph, beside texts from the "
        "vocabulary, and the others measure the quality of both; at least "
        f"{MIN_TEXTS} texts (default: no ranges, and texts from the vocabulary alone for an int8 "
        "graph)",
    )
    parser.add_argument(
        "--sign",
        metavar="KEY",
        type=local_path,
        help="sign the artifact with the private key of an elliptic curve in this PEM file "
        "(default: no signature)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    for module, package in {"torch": "PyTorch", "transformers": "transformers"}.items():
        if importlib.util.find_spec(module) is None:
            print(
                f"vitrine-export: {package} is not installed: run pip install '.[torch]' in the "
                "source folder, or run vitrine-export MODEL --out FOLDER where it is installed, "
                "and serve a copy of FOLDER",
                file=sys.stderr,
            )
            return 2
    # Imported late: these modules need PyTorch.
    from models.export.exporter import export
    from models.export.model_folder import CheckpointError
    from models.export.sentence_config import Overrides
    from models.export.sources import SourceError, resolve
    from models.quantization import read_calibration
    from models.signing import read_private_key

    parser = _parser()
    options = parser.parse_args(arguments)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    overrides = Overrides(
        sparse=options.sparse,
        tokens=options.tokens,
        max_tokens=options.max_tokens,
        pooling=options.pooling and [options.pooling],
        include_prompt=options.include_prompt,
        normalize=options.normalize,
        prompts=_by_name(options.prompt, parser),
        default_prompt=options.default_prompt,
        pair_template=options.pair_template,
    )
    try:
        with folder_beside(options.out):
            pass  # that it can be created is known before the model is read
        int8 = _int8_bounds(options)
        key = None if options.sign is None else read_private_key(options.sign)
        texts = None if options.calibrate is None else _lines(options.calibrate)
        artifact, parity = export(
            resolve(options.model, options.revision),
            options.out,
            dtype=options.dtype,
            target=options.target,
            overrides=overrides,
            copy_source=options.source,
            calibration_texts=texts,
            int8=int8,
            key=key,
            report=lambda line: print(printable(line), flush=True),
        )
    except (SourceError, CheckpointError, ArtifactError, EngineError, OSError) as error:
        print(f"vitrine-export: {printable(_reason(error, options.out))}", file=sys.stderr)
        return 1
    print(_table(parity))
    for graph in artifact.manifest.graphs:
        if graph.quality is not None:
            print(_quality(graph.quality))
        elif graph.parity is None:
            print(
                f"The graph for {graph.engine} was not compared with PyTorch: its engine is not "
                "usable on this machine."
            )
    if (calibration := read_calibration(artifact)) is not None:
        print(_recall(calibration))
    return 0


def _int8_bounds(options: argparse.Namespace) -> "QualityBounds | None":
    """Return the bounds of the int8 graph; None: there is no such graph.

    Raises:
        ArtifactError: There is none, but a bound of it. Or a bound is not from 0 to 1, or is for
            texts that are missing.
    """
    from models.export.int8.quality import QualityBounds

    bounds = QualityBounds(**{name: getattr(options, name) for name in _BOUNDS})
    for name in _BOUNDS:
        if not 0 <= getattr(bounds, name) <= 1:
            raise ArtifactError(f"--{name.replace('_', '-')} must be from 0 to 1")
    if options.precision == "int8":
        if options.calibrate is None and bounds.min_recall != QualityBounds.min_recall:
            raise ArtifactError("--min-recall is for texts of --calibrate")
        return bounds
    if bounds != QualityBounds():
        names = " and ".join(f"--{name.replace('_', '-')}" for name in _BOUNDS)
        raise ArtifactError(f"{names} are for --precision int8")
    return None


def _reason(error: Exception, out: Path) -> str:
    # NumPy's error about a file that is written in part has no number.
    is_partial = re.fullmatch(r"\d+ requested and \d+ written", str(error)) is not None
    if is_partial or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return (
            f"no space is left on the disk of {out.parent}, or on that of the hub's files "
            "(HF_HOME): free some, or choose a folder on another disk"
        )
    return str(error)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{file} is not UTF-8: {error.reason}, at byte {error.start}") from None


def _quality(quality: Quality) -> str:
    lines = [
        f"int8, calibrated with {quality.calibration_texts:,} texts and measured with "
        f"{quality.evaluated_texts:,} others, by number of tokens:",
        f"{'texts':10} {'tokens':>10} {'texts':>6}"
        + "".join(f" {name:>16}" for name in quality.by_length[0].measures),
    ]
    for own in quality.by_length:
        values = "".join(f" {value:16.4f}" for value in own.measures.values())
        lengths = f"{own.min_tokens}-{own.max_tokens}"
        lines.append(f"{own.source:10} {lengths:>10} {own.texts:6,}{values}")
    lines.append(f"{'Costliest layers in int8':41} {'relative error':>15}")
    for name, cost in list(quality.costs.items())[:_SHOWN_LAYERS]:
        kept = "  stays in float" if name in quality.float_layers else ""
        lines.append(f"{name:41} {cost:15.1e}{kept}")
    return "\n".join(lines)


def _recall(calibration: "Calibration") -> str:
    shares = ", ".join(f"{method} {share:.3f}" for method, share in calibration.recall.items())
    return (
        f"Calibrated with {calibration.texts:,} texts; recall@10 of float32's neighbours with "
        f"{calibration.evaluated_texts:,} others: {shares}"
    )


def _table(parity: "list[Parity]") -> str:
    lines = [
        f"{'Parity with PyTorch':41} {'rows':>5} {'worst cosine':>13} {'norm diff':>10} "
        f"{'max |diff|':>11}"
    ]
    lines += [
        f"{line.engine:11} {line.case:20} {line.output:8} {line.rows:5} {line.worst_cosine:13.9f} "
        f"{line.worst_norm:10.1e} {line.max_abs:11.1e}"
        for line in parity
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
