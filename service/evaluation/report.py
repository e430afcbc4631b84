"""The report of a comparison: one HTML file that needs nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from models.engines import EngineError
from models.manifest import ArtifactError
from models.printable import embedded, printable
from service.bulk.parts import native_file
from service.evaluation.comparison import TOP, Evaluated
from service.inference.errors import VitrineError
from service.inference.explain.options import Deletion
from service.inference.model.opening import ModelOptions
from service.inference.model.sync_model import SyncModel
from service.model_cache import required_signer

# Number of queries in the report, and of those whose documents are explained.
_SHOWN, _EXPLAINED = 20, 5
# Number of documents of a query that are explained: those whose places changed most.
_DOCUMENTS = 2
# Number of characters of a text in a table.
_EXCERPT = 160
# Number of documents whose texts are read at once.
_BLOCK_ROWS = 1024

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.5rem}
th,td{text-align:left;padding:.25rem .75rem;border-bottom:1px solid #dde2e8;vertical-align:top}
td.number{text-align:right;font-variant-numeric:tabular-nums}
h2{margin-top:2.5rem}
"""
MEASURE_COLUMNS = ("measure", "old", "new", "difference", "95 % interval", "better", "worse")
_Row = Sequence[object]


def report_html(old: Evaluated, new: Evaluated, comparison: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the report.

    Args:
        old: The evaluation that is the standard.
        new: The other one.
        comparison: Their comparison.
    """
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{_title(old, new)}</title>'
    yield f"<style>{_STYLE}</style><h1>{_title(old, new)}</h1>"
    yield "<p>" + " ".join(summary(comparison, new)) + "</p>"
    if comparison["measures"]:
        yield _table(MEASURE_COLUMNS, measure_rows(comparison))
    settings = [(name, *pair) for name, pair in comparison["settings"].items()]
    yield "<h2>Settings that differ</h2>" + _table(("setting", "old", "new"), settings)
    changed = [own for own in comparison["queries"] if not own["is_equal"]][:_SHOWN]
    if changed:
        yield f"<h2>The {len(changed)} queries that changed most</h2>"
    documents = _texts(
        new.folder / "documents.parquet",
        {document["id"] for own in changed for document in own["documents"]},
    )
    queries = _texts(new.folder / "queries.parquet", {own["query"] for own in changed})
    with ExitStack() as opened:
        models = _open(opened, old, new) if changed else {}
        for place, own in enumerate(changed):
            yield from _query(own, queries[own["query"]], documents)
            if place < _EXPLAINED:
                for name, model in models.items():
                    yield _explanation(name, model, queries[own["query"]], own, documents)


def measure_rows(comparison: Mapping[str, Any]) -> list[_Row]:
    """Return a row with the `MEASURE_COLUMNS` for each measure of a comparison."""
    return [
        (
            name,
            *(own["old"], own["new"], f"{own['difference']:+.4f}"),
            "{:+.4f} to {:+.4f}".format(*own["interval"]),
            *(own["better"], own["worse"]),
        )
        for name, own in comparison["measures"].items()
    ]


def cell_text(value: object) -> str:
    """Return the text of a cell of a table: floats have four decimals."""
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def summary(comparison: Mapping[str, Any], new: Evaluated) -> Iterator[str]:
    """Yield sentences about a comparison."""
    queries = len(comparison["queries"])
    same = comparison["unchanged_queries"]
    yield f"{same:,} of {queries:,} queries have the same first {TOP} documents in the same order."
    overlap = comparison[f"overlap@{TOP}"]
    yield f"On average, {overlap:.1%} of the first {TOP} documents are the same."
    if (correlation := comparison["rank_correlation"]) is not None:
        yield f"Kendall's rank correlation of the documents in both rankings is {correlation:.3f}."
    if new.results["known_items"]:
        yield "The queries are synthetic: sentences of documents, each of which is to be found."


def _title(old: Evaluated, new: Evaluated) -> str:
    return escape(printable(f"{old.folder.absolute().name} and {new.folder.absolute().name}"))


def _table(header: Sequence[str], rows: Sequence[_Row]) -> str:
    head = "".join(f"<th>{escape(name)}" for name in header)
    return f"<table><tr>{head}{''.join(map(_row, rows))}</table>"


def _row(row: _Row) -> str:
    cells = []
    for value in row:
        is_number = isinstance(value, int | float)
        kind = "class=number" if is_number else "dir=auto"
        cells.append(f"<td {kind}>{escape(cell_text(value))}")
    return f"<tr>{''.join(cells)}"


def _texts(path: Path, ids: set[str]) -> dict[str, str]:
    chosen_ids = pa.array(sorted(ids), pa.string())
    texts: dict[str, str] = {}
    for batch in pq.ParquetFile(native_file(path)).iter_batches(_BLOCK_ROWS):
        chosen = batch.filter(pc.is_in(batch.column("id"), chosen_ids))
        texts.update(zip(*(column.to_pylist() for column in chosen.columns), strict=True))
    return texts


def _query(own: Mapping[str, Any], text: str, documents: Mapping[str, str]) -> Iterator[str]:
    yield f"<h3>{escape(embedded(own['query']))}: {escape(embedded(text))}</h3>"
    if own["measures"]:
        values = (
            f"{name} {value['old']:.4f} \N{RIGHTWARDS ARROW} {value['new']:.4f}"
            for name, value in own["measures"].items()
        )
        yield f"<p>{escape(', '.join(values))}</p>"
    yield _table(
        ("old place", "new place", "relevance", "document", "text"),
        [
            (
                *(_place(document[name]) for name in ("old_rank", "new_rank")),
                document["relevance"],
                document["id"],
                _short(documents[document["id"]]),
            )
            for document in own["documents"]
        ],
    )


def _place(rank: int | None) -> object:
    return "beyond these" if rank is None else rank


def _short(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _open(opened: ExitStack, old: Evaluated, new: Evaluated) -> dict[str, SyncModel | str]:
    """Return the model that has made each ranking; a text says why it cannot be opened."""
    models: dict[str, SyncModel | str] = {}
    for name, own in (("old", old), ("new", new)):
        jobs = own.results["jobs"]
        job = jobs.get("pairs", jobs["documents"])
        if "artifact" not in job:
            models[name] = f"its vectors are those of the server {job['url']}"
            continue
        if "pairs" not in jobs and (others := _other_prompts(jobs)):
            models[name] = f"they are of the prompt {' and '.join(others)}"
            continue
        options = ModelOptions(
            engine=job["--engine"], precision=job["--precision"], verify=required_signer()
        )
        try:
            model = opened.enter_context(SyncModel(Path(job["artifact"]), options))
        except (ArtifactError, EngineError, OSError) as error:
            models[name] = str(error)
        else:
            is_same = model.model.identity == job["model version"]
            models[name] = model if is_same else f"{job['artifact']} has another version by now"
    return models


def _other_prompts(jobs: Mapping[str, Any]) -> list[str]:
    """Return the prompts of documents and queries that scores do not have by default."""
    defaults = (("documents", "document"), ("queries", "query"))
    prompts = ((jobs[name]["--prompt-name"], default) for name, default in defaults)
    return [prompt for prompt, default in prompts if prompt not in (None, default)]


def _explanation(
    name: str,
    model: SyncModel | str,
    query: str,
    own: Mapping[str, Any],
    documents: Mapping[str, str],
) -> str:
    """Return the explanation of the scores of the documents whose places changed most."""
    if isinstance(model, str):
        return f"<p>The scores of the {name} model are not explained: {escape(model)}</p>"
    moved = sorted(own["documents"], key=_change, reverse=True)[:_DOCUMENTS]
    texts = [documents[document["id"]] for document in moved]
    try:
        scores = model.score(query, texts, explain=Deletion(by="auto"))
    except VitrineError as error:
        return f"<p>The scores of the {name} model are not explained: {escape(error.detail)}</p>"
    places = (
        f"[{index}] {embedded(document['id'])}, place {_place(document[f'{name}_rank'])}"
        for index, document in enumerate(moved)
    )
    return (
        f"<h4>The {name} model, by its scores of whole texts and vectors: "
        f"{escape('; '.join(places))}</h4>{scores._repr_html_()}"
    )


def _change(document: Mapping[str, Any]) -> float:
    """Return the difference of the reciprocal places, of which the first count most."""
    ranks: Sequence[int | None] = (document["old_rank"], document["new_rank"])
    old, new = (1 / rank if rank else 0.0 for rank in ranks)
    return abs(old - new)
