"""`vitrine explain`: the words or sentences that make a score, coloured in a terminal."""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from models.engines import EngineError
from models.manifest import ArtifactError
from models.printable import printable
from service.artifacts import with_artifacts
from service.inference.errors import VitrineError
from service.inference.explain.deletion import TextEffects, UnitEffect
from service.inference.explain.options import By, Deletion
from service.inference.explain.pictures import ROUNDING, result_name_of, unknown_phrase
from service.inference.model.sync_model import SyncModel
from service.inference.tokenizing.rows import Span
from service.logs import configure
from service.model_cache import model_path
from service.settings import ModelSettings, ModelsSettings, Settings, from_command_line, problems

# Backgrounds of xterm's palette for effects that lower and that raise a score, weak ones first.
_LOWERS, _RAISES = (195, 153, 117, 75, 39), (230, 223, 216, 215, 208)
_ON, _OFF = "\x1b[38;5;16;48;5;{}m", "\x1b[0m"
# Of these, the unprintable ones are escaped: all but line ends, spaces and joiners, which letters
# of Persian and Indic scripts and parts of emoji have behind them. Others, such as those behind
# ASCII, hide.
_ESCAPED = re.compile(
    r"(?<![^\0-\x7f\u200c\u200d])[\u200c\u200d]|"
    r"[^\n\xa0\u1680\u2000-\u200a\u202f\u205f\u3000\u200c\u200d]+"
)
# Maximum number of units of a text in the list of numbers.
_LISTED = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `vitrine explain` and return its exit status."""
    parser = argparse.ArgumentParser(
        "vitrine explain",
        description="Score two texts, or label one, and show what the result is without each of "
        "their words or sentences. Settings such as VITRINE_ENGINE__PRECISION apply.",
    )
    parser.add_argument("texts", metavar="TEXT", nargs="+", help="two texts, or one to label")
    parser.add_argument(
        "--model",
        type=model_path,
        metavar="MODEL",
        help="artifact, model folder, installed package or hub id; default: VITRINE_MODEL__PATH",
    )
    parser.add_argument(
        "--by",
        choices=("auto", "words", "sentences"),
        default="auto",
        help="units of the texts; auto: sentences, then words of the best (default: auto)",
    )
    options = parser.parse_args(arguments)
    if len(options.texts) > 2:
        parser.error(f"{len(options.texts)} texts; give two, or one to label")
    configure("text")
    # https://no-color.org
    has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        settings = with_artifacts(_settings(options.model))
        with SyncModel(settings.model.path, settings.model_options()) as model:
            result, effects, unknown = _explain(model, options.texts, options.by)
    except ValidationError as error:
        print(printable(f"vitrine explain: {next(problems(error))}"), file=sys.stderr)
        return 2
    except (ArtifactError, EngineError, VitrineError, ValueError, OSError) as error:
        print(printable(f"vitrine explain: {error}"), file=sys.stderr)
        return 2
    print(printable(result))  # labels are those of the model
    for own in effects:
        print()
        text = options.texts[own.text]
        print("\n".join(_lines(text, own, unknown[own.text], has_colours=has_colours)))
    return 0


def _settings(model: Path | None) -> Settings:
    settings = from_command_line(())
    if model is not None:
        models = ModelsSettings(cache=settings.models.cache, verify=settings.models.verify)
        update = {"model": ModelSettings(path=model), "models": models}
        return settings.model_copy(update=update)
    if settings.models.folder or settings.models.served:
        raise ValueError("the settings name several models; give one with --model")
    return settings


def _explain(
    model: SyncModel, texts: Sequence[str], by: By
) -> tuple[str, Sequence[TextEffects], Sequence[Sequence[Span]]]:
    """Return a sentence about the result, and of each text the effects and the unknown parts."""
    manifest = model.model.artifact.manifest
    if {"tags", "spans"}.intersection(manifest.outputs):
        raise ValueError(
            f"{manifest.name} labels parts of texts, which have no explanation; give a model that "
            "scores or labels whole texts"
        )
    if len(texts) == 2 and len(manifest.labels) < 2:  # rerankers have one label at most
        scores = model.score(*texts, explain=Deletion(by=by, of="both"))
        # As on the page and in notebooks: sigmoids near 1 hardly change.
        explanation = scores.deletions[0]
        name = f"{scores.kind.replace('_', '-')} {result_name_of(explanation)}"
        sentence = f"{name} {scores.raw_scores[0]:.4f} ({manifest.name})"
        return sentence, explanation.raw_texts, explanation.unknown
    if len(texts) == 1 and "logits" not in manifest.outputs:
        raise ValueError(f"{manifest.name} has no labels; give a second text, to score the two")
    pair = texts[0] if len(texts) == 1 else (texts[0], texts[1])
    labels = model.classify([pair], explain=Deletion(by=by))
    (best,) = labels.best_labels(1)[0]
    name = f"{labels.labels[best]} {labels.scores[0, best]:.4f} ({manifest.name})"
    return name, labels.deletions[0].texts, labels.deletions[0].unknown


def _lines(
    text: str, effects: TextEffects, unknown: Sequence[Span], *, has_colours: bool
) -> Iterator[str]:
    """Yield a text, coloured by the effects of its units, and the largest effects as numbers."""
    least = ROUNDING * abs(effects.whole)
    largest = max((abs(unit.left_out or 0.0) for unit in effects.units), default=0.0)
    start, end = effects.read
    painted, at = "", start
    for unit in effects.units:
        content = _escape(text[unit.start : unit.end])
        colour = _colour(unit, largest, least) if has_colours else None
        painted += _escape(text[at : unit.start])
        painted += content if colour is None else f"{_ON.format(colour)}{content}{_OFF}"
        at = unit.end
    yield painted + _escape(text[at:end])
    if (start, end) != (0, len(text)):
        yield f"(the model reads the characters {start} to {end} of {len(text)})"
    if unknown:
        yield f"({_escape(unknown_phrase(text, unknown))})"
    for kind, units in ((effects.by, effects.units), ("words", effects.words)):
        listed = sorted(units, key=lambda unit: -abs(unit.left_out or 0.0))[:_LISTED]
        if listed:
            few = f", the {_LISTED} largest of {len(units)}" if len(units) > _LISTED else ""
            yield f"The result less that without each of its {kind}{few}:"
        for unit in listed:
            number = "not measured" if unit.left_out is None else f"{unit.left_out:+.4f}"
            yield f"  {number}  {_escape(' '.join(text[unit.start : unit.end].split()))}"


def _escape(text: str) -> str:
    """Return a text without characters that control a terminal, or hide or reorder text."""
    return _ESCAPED.sub(lambda found: printable(found[0]), text)


def _colour(unit: UnitEffect, largest: float, least: float) -> int | None:
    """Return the background of a unit in xterm's palette; None: its effect is below `least`."""
    if not unit.left_out or abs(unit.left_out) < least:
        return None
    shades = _RAISES if unit.left_out > 0 else _LOWERS
    return shades[min(int(abs(unit.left_out) / largest * len(shades)), len(shades) - 1)]


if __name__ == "__main__":
    sys.exit(main())
