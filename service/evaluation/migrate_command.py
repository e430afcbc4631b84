"""`vitrine migrate`: the command line that adds the space of an old model to a new one."""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.table import Table

from models.artifact import hashes, new_folder, write_manifest
from models.local_path import local_path
from models.manifest import SPACES, ArtifactError
from models.printable import printable
from models.spaces import NAME_RULE, SpaceInfo, is_name, write_space
from service.bulk.job import writing_errors
from service.bulk.options import BulkError, OptionError
from service.evaluation.comparison import read_evaluation
from service.evaluation.migration import Migration, fit

_MIN_RECALL = 0.9


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "vitrine migrate",
        description="Map the vectors of a new model's queries into the space of an old model, so "
        "that the new model searches the old index until the new one is built.",
        epilog="Exit status: 0: done; 1: the best map is too weak; 2: an option was refused.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("output", type=local_path, metavar="OUTPUT", help="folder for the new model's artifact")
    add(
        "--old",
        type=local_path,
        required=True,
        metavar="FOLDER",
        help="output of vitrine eval, old model",
    )
    add("--new", type=local_path, required=True, metavar="FOLDER", help="the same of the new model")
    add("--space", required=True, metavar="NAME", help=f"name in requests, {NAME_RULE}")
    add(
        "--min-recall",
        type=float,
        default=_MIN_RECALL,
        metavar="SHARE",
        help="lowest recall@10, relative to full re-embedding, of a map that is written "
        f"(default: {_MIN_RECALL})",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if not is_name(options.space):
            raise OptionError(f"--space must have {NAME_RULE}")
        if not 0 <= options.min_recall <= 1:
            raise OptionError("--min-recall must be from 0 to 1")
        if options.output.exists():
            raise OptionError(f"{options.output} already exists; remove it or choose another")
        migration = fit(read_evaluation(options.old), read_evaluation(options.new))
        _show(migration)
        if not migration.recall_ratio >= options.min_recall:
            return _fail(
                f"the best map reaches {migration.recall_ratio:.3f} of the recall of full "
                f"re-embedding, and --min-recall is {options.min_recall:g}: nothing was written",
                1,
            )
        with writing_errors(options.output):
            _write(migration, options.output, options.space)
    except (BulkError, ArtifactError, OSError) as error:
        return _fail(error, 2)
    except (pa.ArrowInvalid, KeyError) as error:
        return _fail(f"an evaluation is incomplete or damaged; repeat it: {error}", 2)
    print(
        f'{printable(str(options.output))} takes "space": "{options.space}", '
        f"{migration.recall_ratio:.3f} of the recall of full re-embedding"
    )
    return 0


def _fail(error: Exception | str, status: int) -> int:
    print(printable(f"vitrine migrate: {error}"), file=sys.stderr)
    return status


def _show(migration: Migration) -> None:
    table = Table("search", "recall@10", "overlap@10", box=None, pad_edge=False)
    for name, recall in migration.recalls.items():
        table.add_row(name, f"{recall:.4f}", f"{migration.overlaps[name]:.4f}")
    Console().print(table)
    print(
        f"Maps were fitted with {migration.pairs:,} documents, and search the old index with new "
        f"queries. The table is of {migration.queries:,} queries, others than those that chose "
        f"{migration.form!r}."
    )


def _write(migration: Migration, output: Path, space: str) -> None:
    """Write the new model's artifact with the space; its other files are hard links.

    Raises:
        ArtifactError: The artifact already has the space.
    """
    artifact = migration.artifact
    # Files are hard links, and some file systems ignore case.
    if space.lower() in map(str.lower, artifact.manifest.spaces):
        raise ArtifactError(f"{artifact.path} already has the space {space}")
    measures = {
        "recall_ratio": migration.recall_ratio,
        "recall@10": migration.recalls[migration.form],
        "overlap@10": migration.overlaps[migration.form],
    }
    info = SpaceInfo(
        model=migration.model,
        similarity=migration.similarity,
        normalizes=migration.normalizes,
        prompt_name=migration.prompt_name,
        form=migration.form,
        pairs=migration.pairs,
        queries=migration.queries,
        measures=measures,
    )
    with new_folder(output) as folder:
        for name in artifact.manifest.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(artifact.verify(name), folder / name)
        write_space(folder, space, info, migration.map.matrix, migration.map.constant)
        files = {f"{SPACES}/{own}": digest for own, digest in hashes(folder / SPACES).items()}
        manifest = artifact.manifest
        spaces = {**manifest.spaces, space: migration.version}
        write_manifest(folder, replace(manifest, files={**manifest.files, **files}, spaces=spaces))


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
