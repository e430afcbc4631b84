"""`open_job`: opens the model of a job and checks the options with it."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version

import pyarrow as pa

from models.artifact import Artifact
from models.engines import select_engine
from service.bulk.encoder import RecordEncoder
from service.bulk.kinds import RESULT_KINDS, kind_of
from service.bulk.options import ROW, BulkOptions, Kind, OptionError
from service.bulk.parts import with_metadata
from service.bulk.pipeline import Pipeline
from service.bulk.sources import Source
from service.inference.model.model import Model
from service.inference.model.opening import ModelOptions, open_model

# The pipeline bounds what is in flight, so that the model needs no limits of its own.
_NO_LIMIT = 2**62
# Maximum cost of a batch, by engine; others have their default. It is larger than the service's,
# because nobody waits for a batch. Per CPU second, onnxruntime computes 1.8 % more tokens than with
# the service's 384. OpenVINO computes 8 % more than with 512 in bfloat16, and 3 % in float32
# (all-MiniLM-L6-v2, AMD EPYC with AVX512-BF16).
_MAX_COST = {"onnxruntime": 512, "openvino": 1024}
# Maximum number of characters that are tokenised at once. Those of texts without words, such as
# dots, take 620 bytes each.
MAX_WHOLE_CHARS = 2**20
# Maximum number of chunks of the texts of a block.
_MAX_CHUNKS = 2**16


@dataclass(frozen=True)
class OpenJob:
    """A job whose model is open.

    Attributes:
        options: Settings of the job.
        kind: Kind of the results.
        source: The input.
        model: The model.
        encoder: Computes the results of records.
    """

    options: BulkOptions
    kind: Kind
    source: Source
    model: Model
    encoder: RecordEncoder

    @property
    def settings(self) -> dict[str, object]:
        """All that determines the output. A job is resumed with the same settings only."""
        options, source, model = self.options, self.source, self.model
        return {
            **{f"input file {i + 1}": file.sha256 for i, file in enumerate(source.files)},
            "--input-format": source.format,
            "--template": options.template,
            "text columns": list(source.text_columns),
            "copied columns": [f"{column.name}: {column.type}" for column in source.copied],
            "--prompt-name": options.prompt_name,
            "--kind": self.kind,
            "chunking": None if options.chunking is None else asdict(options.chunking),
            "--highlight": options.highlight,
            "--dimensions": options.dimensions,
            "--dtype": options.dtype,
            "--limit": options.limit,
            "--format": options.format,
            "--part-rows": options.part_rows,
            "--engine": model.engine.name,
            "--precision": model.engine.precision,
            "model version": model.identity,
        }

    @property
    def schema(self) -> pa.Schema:
        """Columns of the output, and the metadata of its files."""
        # One hash for all input files, because there may be thousands, and each part has this.
        digests = "".join(file.sha256 for file in self.source.files)
        metadata = {
            "model": self.model.name,
            "version": version("vitrine"),
            "input sha256": hashlib.sha256(digests.encode()).hexdigest(),
            **{name: v for name, v in self.settings.items() if not name.startswith("input file")},
        }
        return with_metadata(self.pipeline().schema, metadata)

    def pipeline(self) -> Pipeline:
        """Return a new pipeline, which encodes blocks of the input."""
        return Pipeline(self.encoder, self.options, self.kind, self.source.copied)


def checked_kind(options: BulkOptions) -> Kind:
    """Return the kind of the results, by the options and the manifest of the artifact.

    Raises:
        OptionError: The model cannot compute the kind, or an option does not apply to it.
        ArtifactError: The artifact is incomplete or invalid, or not signed by `options.signer`.
    """
    kind = kind_of(Artifact.load(options.model, options.signer).manifest, options.kind)
    if options.dimensions is not None and kind not in ("dense", "chunks"):
        raise OptionError(f"--dimensions applies to dense vectors, not to {kind}")
    if options.chunking is not None and kind not in ("chunks", "scores"):
        raise OptionError(f"--chunking applies to chunks and scores, not to {kind}")
    if options.highlight is not None and kind != "scores":
        raise OptionError(f"--highlight applies to scores, not to {kind}")
    if options.query_column != BulkOptions.query_column and kind != "scores":
        raise OptionError(f"--query-column applies to scores, not to {kind}; set --kind scores")
    if options.dtype not in RESULT_KINDS[kind].dtypes:
        raise OptionError(f"--dtype {options.dtype} does not apply to {kind}")
    if options.format == "npy" and kind != "dense":
        raise OptionError(f"--format npy applies to dense vectors, not to {kind}")
    return kind


@asynccontextmanager
async def open_job(options: BulkOptions, kind: Kind, source: Source) -> AsyncIterator[OpenJob]:
    """Open the model of a job, and check the options and the copied columns.

    Raises:
        OptionError: The model refuses an option, or a copied column has the name of a result.
        ArtifactError: The artifact is incomplete or invalid, or not signed by `options.signer`.
        EngineError: The engine is unavailable on this machine, or fails the self-check.
    """
    async with await open_model(options.model, _model_options(options)) as model:
        encoder = await RecordEncoder.create(model, options, kind)
        for name in source.copied.names:
            if name in (ROW, *encoder.schema.names):
                raise OptionError(
                    f"the output has a column {name!r} of its own; rename the input's"
                )
        yield OpenJob(options, kind, source, model, encoder)


def _model_options(options: BulkOptions) -> ModelOptions:
    artifact = Artifact.load(options.model, options.signer)
    engine = select_engine(artifact, options.engine, options.precision)
    return ModelOptions(
        engine=options.engine,
        precision=options.precision,
        threads=options.threads,
        max_cost=_MAX_COST.get(engine, 0),
        max_queue_tokens=_NO_LIMIT,
        max_chars=_NO_LIMIT,
        max_whole_chars=MAX_WHOLE_CHARS,
        max_token_vectors=_NO_LIMIT,
        max_chunks=_MAX_CHUNKS,
        verify=options.signer,
    )
