"""Entities and scores of exported GLiNER models against the package gliner, as a table.

The models are those of tests/models/gliner.py: small, with random weights. The package requires an
older transformers than this project, so it is no dependency of the tests; 0.2.29 also runs with
this project's: `pip install --no-deps --target FOLDER gliner==0.2.29`, and `PYTHONPATH=FOLDER`.
"""

import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import vitrine
from models.export.exporter import export
from models.export.sources import resolve
from tests.models.gliner import KINDS, save_gliner
from tests.service.api.test_tag_labels import LABELS, make_texts

TEXTS = ["a", "the cat " * 25, " ", "<<ENT>> the [SEP]", *make_texts(196)]
MODES = [(nested, multi_label) for nested in (False, True) for multi_label in (False, True)]


def compare(kind: str) -> tuple[int, int, float]:
    """Return the number of entities, of texts with other entities, and the worst difference."""
    from gliner import GLiNER

    entities, others, worst = 0, 0, 0.0
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory, "model")
        save_gliner(folder, kind)
        package: Any = GLiNER.from_pretrained(str(folder), strict=True)
        export(resolve(str(folder)), artifact := Path(directory, "artifact"))
        with vitrine.SyncModel(artifact) as model:
            for nested, multi_label in MODES:
                expected = package.inference(
                    TEXTS, LABELS, flat_ner=not nested, multi_label=multi_label
                )
                options: Any = {"nested": nested, "multi_label": multi_label}
                actual = [model.tag([text], labels=LABELS, **options)[0] for text in TEXTS]
                for theirs, ours in zip(expected, actual, strict=True):
                    places = [(e["start"], e["end"], e["text"], e["label"]) for e in theirs]
                    entities += len(places)
                    if places != [(e.start, e.end, e.text, e.label) for e in ours]:
                        others += 1
                        continue
                    for e, own in zip(theirs, ours, strict=True):
                        worst = max(worst, abs(e["score"] - own.score))
    return entities, others, worst


def main() -> None:
    """Print a line for each kind of encoder; the arguments are kinds (default: all)."""
    warnings.simplefilter("ignore")  # the package warns of each text that it truncates
    print(f"{'encoder':12} {'entities':>8} {'other texts':>11} {'worst score':>11}")
    for kind in sys.argv[1:] or KINDS:
        entities, others, worst = compare(kind)
        print(f"{kind:12} {entities:8} {others:11} {worst:11.1e}", flush=True)


if __name__ == "__main__":
    main()
