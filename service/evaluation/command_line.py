"""`vitrine eval`: the command line of evaluations."""

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import orjson
from rich.console import Console
from rich.table import Table

from models.engines import Precision
from models.local_path import local_path
from models.printable import printable
from service.bulk.command_line import (
    INTERRUPTED,
    add_chunking,
    chunking_of,
    exit_status,
    export_if_needed,
    interruptible,
)
from service.bulk.job import writing_errors
from service.bulk.options import DTYPES, BulkOptions, OptionError
from service.bulk.progress import report_progress
from service.evaluation.collection import CollectionFiles, the_file
from service.evaluation.comparison import Evaluated, compare, read_evaluation
from service.evaluation.evaluation import EvaluationOptions, Job, evaluate, write_file
from service.evaluation.gate import COMPARISON
from service.evaluation.measures import DEFAULT, parse_measures
from service.evaluation.report import MEASURE_COLUMNS, cell_text, measure_rows, report_html, summary
from service.evaluation.server import CONTRACTS, ContractName, ServerJob
from service.model_cache import model_path, required_signer

EPILOG = (
    "Exit status: 0: done; 1: failed, what is finished is kept; 2: an option was refused; "
    "3: done, with errors of texts; 4: interrupted."
)


# Options of models in this process.
_MODEL_OPTIONS = (
    *("query_prompt", "document_prompt", "dimensions", "dtype"),
    *("chunking", "chunk_size", "chunk_overlap", "late"),
)
# The same, of rerankers too.
_RUN_OPTIONS = ("engine", "precision", "threads")
# Options that another one needs.
_NEEDS = {"split": "beir", "contract": "server", "rerank_top": "reranker"}
# Environment variable with the API key of a server: commands are seen by other users.
_KEY = "VITRINE_KEY"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "vitrine eval",
        description="Search a collection with a model, and measure the rankings by relevance "
        "judgements. Started again with the same options, the command continues where it was "
        "interrupted.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "output", type=local_path, metavar="OUTPUT", help="folder for vectors, rankings and results"
    )
    add("--model", help="artifact, folder, package or hub id; name on a server (default: none)")
    add(
        "--server",
        metavar="URL",
        help="server for the vectors; VITRINE_KEY: its API key (default: none)",
    )
    add("--contract", choices=CONTRACTS, help="contract of --server (default: openai)")
    add("--query-prefix", default="", help="text before queries, for --server (default: none)")
    add("--document-prefix", default="", help="text before documents, for --server (default: none)")
    add(
        "--beir",
        type=local_path,
        metavar="FOLDER",
        help="corpus.*, queries.* and qrels/ (default: none)",
    )
    add("--split", help="judgements in the qrels/ of --beir (default: test)")
    add("--corpus", type=local_path, metavar="FILE", help="documents (default: of --beir)")
    add("--queries", type=local_path, metavar="FILE", help="queries (default: of --beir)")
    add("--qrels", type=local_path, metavar="FILE", help="judgements (default: of --beir, or none)")
    add(
        "--known-items",
        type=int,
        metavar="N",
        help="make queries of sentences of N documents (default: read them)",
    )
    add(
        "--against",
        type=local_path,
        metavar="FOLDER",
        help="earlier OUTPUT to compare (default: none)",
    )
    add("--measures", default=DEFAULT, help=f"default: {DEFAULT}")
    add(
        "--ignore-identical-ids", action="store_true", help="leave out documents that are the query"
    )
    add("--query-prompt", default="query", help="name of the prompt of queries (default: query)")
    add("--document-prompt", default="document", help="the same of documents (default: document)")
    add("--dimensions", type=int, help="number of leading dimensions to keep (default: all)")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="type of documents' vectors (default: float32)",
    )
    add_chunking(parser)
    add(
        "--reranker",
        type=model_path,
        help="model that ranks the best documents again (default: none)",
    )
    add("--rerank-top", type=int, help="number of documents for --reranker (default: 100)")
    add("--engine", default="auto", help="onnxruntime, openvino or cuda (default: auto)")
    add("--precision", choices=get_args(Precision), default="float32", help="default: float32")
    add("--threads", type=int, default=0, help="number of threads (default: one per CPU)")
    add("--progress", choices=("auto", "json", "none"), default="auto", help="default: auto")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    values = vars(_parser().parse_args(arguments))
    return exit_status("vitrine eval", partial(_run, values))


def _run(values: Mapping[str, Any]) -> int:
    with report_progress(values["progress"]) as report:
        old = None if values["against"] is None else read_evaluation(values["against"])
        options = replace(_options(values), compared_sha256=old.collection if old else None)
        results = asyncio.run(interruptible(lambda stop: evaluate(options, report, stop)))
    if results is None:
        print("vitrine eval: interrupted: start again with the same options", file=sys.stderr)
        return INTERRUPTED
    _show(results, options.folder)
    if old is not None:
        _compare(old, read_evaluation(options.folder))
    return 3 if any(job["errors"] for job in results["jobs"].values()) else 0


def _options(values: Mapping[str, Any]) -> EvaluationOptions:
    """Return the settings of an evaluation by the values of the command line.

    Raises:
        OptionError: An option is invalid.
        EngineError: An engine is unknown or unavailable on this machine.
        ArtifactError: A model cannot be found or exported.
    """
    measures = tuple(parse_measures(values["measures"]))
    for name, other in _NEEDS.items():
        if values[name] is not None and values[other] is None:
            raise OptionError(f"--{name.replace('_', '-')} needs --{other}")
    top = 100 if values["rerank_top"] is None else values["rerank_top"]
    if top < 1:
        raise OptionError("--rerank-top must be at least 1")
    files = _files(values)
    shared = {name: values[name] for name in _RUN_OPTIONS}
    folder: Path = values["output"]
    # Inputs and outputs of the jobs are set when they run.
    own: dict[str, Any] = {"inputs": (), "output": folder, **shared, "signer": required_signer()}
    documents, queries = _jobs(values, own)
    reranker = None
    if values["reranker"] is not None:
        model = export_if_needed(values["reranker"], values["engine"], values["precision"])
        columns = ("query_id", "document_id")
        reranker = BulkOptions(**own, model=model, columns=columns, kind="scores")
    return EvaluationOptions(
        files=files,
        folder=folder,
        measures=measures,
        documents=documents,
        queries=queries,
        reranker=reranker,
        rerank_top=top,
        ignores_identical_ids=values["ignore_identical_ids"],
    )


def _server(values: Mapping[str, Any]) -> ServerJob:
    """Return the server by the values of the command line.

    Raises:
        OptionError: An option is missing, invalid, or does not apply to a server.
    """
    parser = _parser()
    for name in (*_MODEL_OPTIONS, *(_RUN_OPTIONS if values["reranker"] is None else ())):
        if values[name] != parser.get_default(name):
            option = name.replace("_", "-")
            raise OptionError(f"--{option} applies to models in this process, not to --server")
    name = values["model"] or ""
    contract: ContractName = values["contract"] or "openai"
    if not name and contract == "openai":
        raise OptionError("OpenAI's contract needs --model, the name that the server knows")
    if name and contract == "tei":
        raise OptionError("TEI's contract has no names of models; leave out --model")
    if not re.match(r"https?://[^/]", values["server"]):
        raise OptionError("--server must be a URL, such as http://127.0.0.1:8000")
    if "@" in values["server"]:
        raise OptionError(f"--server has a password; give an API key in {_KEY}")
    return ServerJob(values["server"], contract, name, key=os.environ.get(_KEY, ""))


def _jobs(values: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[Job, Job]:
    """Return how documents and queries are encoded.

    Args:
        values: Values of the command line.
        own: Settings of all bulk jobs.
    """
    if values["server"] is not None:
        server = _server(values)
        documents, queries = (
            replace(server, prefix=values[name]) for name in ("document_prefix", "query_prefix")
        )
        return documents, queries
    if values["query_prefix"] or values["document_prefix"]:
        raise OptionError("--query-prefix and --document-prefix are for --server; see the prompts")
    if values["model"] is None:
        raise OptionError("give --model, or --server")
    try:
        path = model_path(values["model"])
    except argparse.ArgumentTypeError as error:
        raise OptionError(f"--model: {error}") from None
    model = export_if_needed(path, values["engine"], values["precision"])
    vectors = {**own, "model": model, "id_column": "id", "dimensions": values["dimensions"]}
    chunking = chunking_of(values)
    return BulkOptions(
        **vectors,
        dtype=values["dtype"],
        prompt_name=values["document_prompt"],
        chunking=chunking,
        kind=None if chunking is None else "chunks",
    ), BulkOptions(**vectors, prompt_name=values["query_prompt"])


def _files(values: Mapping[str, Any]) -> CollectionFiles:
    corpus, queries, qrels = (values[name] for name in ("corpus", "queries", "qrels"))
    count = values["known_items"]
    if values["beir"] is not None:
        if corpus or queries or qrels:
            raise OptionError("--beir excludes --corpus, --queries and --qrels")
        if len({os.path.realpath(values[name]) for name in ("output", "beir")}) < 2:
            raise OptionError("OUTPUT must be another folder than --beir, which has queries.* too")
        if count is None:
            return CollectionFiles.in_folder(values["beir"], values["split"] or "test")
        corpus = the_file(values["beir"], "corpus")
    if corpus is None:
        raise OptionError("give documents: --beir or --corpus")
    if count is not None:
        if queries or qrels or values["ignore_identical_ids"]:
            raise OptionError(
                "--known-items excludes --queries, --qrels and --ignore-identical-ids"
            )
        if count < 1:
            raise OptionError("--known-items must be at least 1")
        return CollectionFiles(corpus, None, None, count)
    if queries is None:
        raise OptionError("give queries: --queries or --known-items")
    return CollectionFiles(corpus, queries, qrels)


def _show(results: Mapping[str, Any], folder: Path) -> None:
    counts, place = results["collection"], printable(str(folder))
    if results["measures"]:
        table = Table("measure", "mean", box=None, pad_edge=False)
        for name, value in results["measures"].items():
            table.add_row(name, f"{value:.4f}")
        Console().print(table)
    print(
        f"{counts['queries']:,} queries, {counts['documents']:,} documents, "
        f"{counts['judgements']:,} judgements; {place}/results.json has each query's"
    )
    if results["known_items"]:
        print("The queries are synthetic: sentences of documents, each of which is to be found")
    if unknown := counts["judgements_of_unknown_documents"]:
        print(f"{unknown:,} judgements are of documents that the corpus does not have")
    for name, job in results["jobs"].items():
        if job["errors"]:
            print(f"{job['errors']:,} of the {name} have errors; {place}/{name} has them")


def _compare(old: Evaluated, new: Evaluated) -> None:
    """Compare an evaluation with another one, and write and show the differences."""
    folder = new.folder
    try:
        comparison = compare(old, new)
        with writing_errors(folder):
            content = orjson.dumps(comparison, option=orjson.OPT_INDENT_2)
            write_file(folder / COMPARISON, [content])
            parts = (part.encode() for part in report_html(old, new, comparison))
            write_file(folder / "comparison.html", parts)
    except KeyError as error:
        raise OptionError(f"an evaluation is damaged, repeat it: it lacks {error}") from error
    lacking = old.results["measures"].keys() ^ new.results["measures"].keys()
    if lacking:
        print(f"not compared, because one of the two lacks them: {', '.join(sorted(lacking))}")
    if comparison["measures"]:
        table = Table(*MEASURE_COLUMNS, box=None, pad_edge=False)
        for row in measure_rows(comparison):
            table.add_row(*map(cell_text, row))
        Console().print(table)
    print("\n".join(summary(comparison, new)))
    place = printable(str(folder))
    print(f"{place}/comparison.html has the queries that changed most, and explains why")
