"""The settings of a bulk job."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Literal, get_args

from models.engines import Precision
from service.inference.tokenizing.chunking import Chunking

InputFormat = Literal["parquet", "jsonl", "csv", "tsv", "text"]
OutputFormat = Literal["parquet", "jsonl", "npy"]
# Kinds of results, by their names on the command line.
Kind = Literal["dense", "chunks", "sparse", "multi", "scores", "labels"]
Dtype = Literal["float32", "float16", "int8", "uint8", "binary", "ubinary"]

INPUT_FORMATS: tuple[InputFormat, ...] = get_args(InputFormat)
OUTPUT_FORMATS: tuple[OutputFormat, ...] = get_args(OutputFormat)
KINDS: tuple[Kind, ...] = get_args(Kind)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

# Columns of every output, besides those of its kind.
ROW, TOKENS, TRUNCATED, ERROR = "row", "tokens", "truncated", "error"
# Column of the best sentences of each text.
HIGHLIGHTS = "highlights"


class BulkError(Exception):
    """A job cannot start or continue; the message states the reason and the remedy."""


class OptionError(BulkError):
    """An option is invalid, or contradicts the model, the input or the output."""


@dataclass(frozen=True, kw_only=True)
class BulkOptions:
    """Settings of a job.

    Attributes:
        inputs: Files, folders and glob patterns; "-": standard input.
        output: Folder for the results.
        model: Folder of an artifact written by `vitrine-export`.
        input_format: Format of the input; None: by the names of the files.
        text_column: Column with the texts.
        template: Text of each record, with names of columns in braces; None: `text_column`.
        query_column: Column with the query of each text, for the kind "scores".
        id_column: Column with the ids of the records; None: their row numbers.
        columns: Columns to copy to the output.
        prompt_name: See `Model.encode`; for rerankers, see `Model.score`.
        kind: Kind of the results; None: that of the model's first output.
        chunking: How texts are divided into chunks, for the kinds "chunks" and "scores"; None: they
            are not.
        highlight: Number of best sentences of each text, for the kind "scores"; None: none. See
            `Highlights`.
        dimensions: Number of leading dimensions to keep; None: all. See `Model.encode`.
        dtype: Type of the numbers of vectors; see `Model.quantizer` for integers and bits.
        limit: Maximum number of records; None: all.
        shard: This job's share of the parts: the i-th of n, from (1, 1).
        format: Format of the output.
        concat: Whether the parts are joined in one file at the end.
        part_rows: Number of records per part, which is the unit of resumption.
        max_memory: Maximum size in bytes of the records and results in memory, besides the model.
        max_errors: Number of records with errors above which the job stops; None: never.
        verify: Number of random rows that are encoded again, one at a time, and compared.
        engine: See `ModelOptions.engine`.
        precision: See `ModelOptions.precision`.
        threads: See `ModelOptions.threads`.
        signer: See `ModelOptions.verify`.
    """

    inputs: tuple[str, ...]
    output: Path
    model: Path
    input_format: InputFormat | None = None
    text_column: str = "text"
    template: str | None = None
    query_column: str = "query"
    id_column: str | None = None
    columns: tuple[str, ...] = ()
    prompt_name: str | None = None
    kind: Kind | None = None
    chunking: Chunking | None = None
    highlight: int | None = None
    dimensions: int | None = None
    dtype: Dtype = "float32"
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)
    format: OutputFormat = "parquet"
    concat: bool = False
    part_rows: int = 8192
    max_memory: int = 256 * 2**20
    max_errors: int | None = None
    verify: int = 0
    engine: str = "auto"
    precision: Precision = "float32"
    threads: int = 0
    signer: Path | None = None

    def __post_init__(self) -> None:
        """Check what depends on no file.

        Raises:
            OptionError: An option is invalid.
        """
        index, count = self.shard
        if not 1 <= index <= count:
            raise OptionError("--shard I/N: the number I must be from 1 to N")
        if self.concat and count > 1:
            raise OptionError(
                "--concat needs all parts: run once without --shard after the shards have finished"
            )
        for name in ("dimensions", "limit", "part_rows", "max_memory"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} must be at least 1")
        for name in ("verify", "max_errors", "threads"):
            if (getattr(self, name) or 0) < 0:
                raise OptionError(f"--{name.replace('_', '-')} must be at least 0")
        if self.verify and "-" in self.inputs:
            raise OptionError("--verify reads the input again, which standard input does not allow")
        if self.verify and (self.format != "parquet" or count > 1):
            raise OptionError("--verify needs Parquet, and all parts: run once without --shard")
        self._check_columns()

    def _check_columns(self) -> None:
        names = (self.text_column, self.query_column, self.template or "", *self.copied_columns)
        try:
            "".join(names).encode()
        except UnicodeEncodeError:
            raise OptionError("--template and names of columns must be valid UTF-8") from None
        if self.template is not None and not self.template_columns:
            raise OptionError("--template has no column in braces, such as {title}")

    def has_part(self, number: int) -> bool:
        """Return whether a part is one of this job's shard."""
        index, count = self.shard
        return number % count == index - 1

    @property
    def template_columns(self) -> tuple[str, ...]:
        """Names of the columns in the template.

        Raises:
            OptionError: The template is invalid.
        """
        try:
            fields = list(Formatter().parse(self.template or ""))
        except ValueError as error:
            raise OptionError(f"--template is invalid: {error}") from None
        for _, name, spec, conversion in fields:
            if name is not None and (
                not re.fullmatch(r"(?!\d+$)[^.\[]+", name) or spec or conversion
            ):
                raise OptionError("--template takes names of columns in braces alone")
        return tuple(dict.fromkeys(name for _, name, _, _ in fields if name is not None))

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """Columns that are copied to the output, the ids first."""
        ids = () if self.id_column is None else (self.id_column,)
        return tuple(dict.fromkeys((*ids, *self.columns)))

    def text_columns(self, kind: Kind) -> Sequence[str]:
        """Return the columns from which the texts of a record are made."""
        texts = (self.text_column,) if self.template is None else self.template_columns
        return (self.query_column, *texts) if kind == "scores" else texts
