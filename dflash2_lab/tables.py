"""Run folders: table schemas, atomic Parquet shards, run.json and the `Run` that reads them.

A run is a folder with `run.json` and one Parquet file per table, either `<table>.parquet` or
the shards `<table>-00000.parquet`, `<table>-00001.parquet`, ... (no gaps). A file appears under
its final name only when it is complete and on disk, so a run killed at any moment leaves whole
shards, and the next run starts at the first missing one.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dflash2_lab.errors import LabError
from dflash2_lab.schema import SCHEMA_VERSION, conform, conform_frame, schema_of, to_arrow

RUN_INFO_FILE = "run.json"
CHECKPOINT_FILE = "checkpoint.pt"  # of a training, which writes run.json when it ends

logger = logging.getLogger(__name__)


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` fill a temporary file beside `path`, sync it to disk, then rename it to `path`.

    Readers see the old file or the whole new one. An OSError (a full disk, a read-only folder)
    removes the temporary file and becomes a LabError that names `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as handle:
            write(handle)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
        # A writer that was killed leaves its temporary file; the finished file makes it useless.
        for stale in path.parent.glob(f".{path.name}.*.tmp"):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise LabError(
            f"{path}: could not be written ({error.strerror or error}); nothing was left behind, "
            f"free the space or fix the folder and run again"
        ) from error
    finally:
        # Where the folder is no folder there is nothing to remove either.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    # The rename itself is durable only once the folder entry is on disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shard_path(folder: Path, table: str, index: int) -> Path:
    """Return `folder/<table>-<index, five digits>.parquet`."""
    schema_of(table)
    if not 0 <= index < 100_000:
        raise LabError(f"shard index of table {table!r}: found {index}, expected 0 to 99999")
    return Path(folder) / f"{table}-{index:05d}.parquet"


def write_shard(folder: Path, table: str, index: int, frame: pd.DataFrame) -> None:
    """Write one shard of a table atomically (zstd Parquet, the schema's column order and types).

    Raises:
        LabError: unknown table, missing, unknown, null or ill-typed column, or an OSError.
    """
    path = shard_path(folder, table, index)
    arrow = to_arrow(frame, table, f"shard {index}")
    write_atomic(path, lambda handle: pq.write_table(arrow, handle, compression="zstd"))


def shard_done(folder: Path, tables: Sequence[str], index: int) -> bool:
    """Tell whether shard `index` of every one of `tables` is on disk (a resumed run skips it)."""
    return all(shard_path(folder, table, index).is_file() for table in tables)


def read_table(folder: Path, table: str) -> pd.DataFrame:
    """Read a table, shards joined in the order of their index.

    Raises:
        LabError: no file, a gap in the shards, an unreadable file or one with other columns.
    """
    parts = [_read_file(path, table) for path in _table_files(Path(folder), table)]
    return pa.concat_tables(parts).to_pandas()


def _table_files(folder: Path, table: str) -> list[Path]:
    schema_of(table)
    whole = folder / f"{table}.parquet"
    shards = sorted(
        path for path in folder.glob(f"{table}-*.parquet") if re.search(r"-\d{5}$", path.stem)
    )
    if whole.is_file() and shards:
        raise LabError(f"{folder}: both {whole.name} and {shards[0].name} found, expected one kind")
    if whole.is_file():
        return [whole]
    if not shards:
        raise LabError(f"{folder}: table {table!r} not found, expected {table}-00000.parquet")
    for index, path in enumerate(shards):
        if path != shard_path(folder, table, index):
            expected = shard_path(folder, table, index).name
            raise LabError(f"{folder}: {path.name} found, expected {expected} before it")
    return shards


def _read_file(path: Path, table: str) -> pa.Table:
    try:
        arrow = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise LabError(f"{path}: not a readable Parquet file ({error})") from error
    return conform(arrow, table, str(path))


def write_run_info(folder: Path, info: Mapping[str, Any]) -> None:
    """Write run.json atomically with sorted keys; `schema_version` is added when absent.

    Raises:
        LabError: info of another schema version, values JSON cannot hold, or an OSError.
    """
    path = Path(folder) / RUN_INFO_FILE
    versioned = _versioned(info, str(path))
    try:
        text = json.dumps(versioned, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LabError(f"{path}: the run information is not plain JSON ({error})") from error
    write_atomic(path, lambda handle: handle.write(f"{text}\n".encode()))


def read_run_info(folder: Path) -> dict[str, Any]:
    """Read run.json.

    Raises:
        LabError: file missing, malformed, or of another schema version.
    """
    path = Path(folder) / RUN_INFO_FILE
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise LabError(f"{path}: not found, expected a run folder with {RUN_INFO_FILE}") from error
    except (OSError, ValueError) as error:
        raise LabError(f"{path}: malformed ({error}), expected a JSON object") from error
    if not isinstance(info, dict):
        raise LabError(f"{path}: found {type(info).__name__}, expected a JSON object")
    if "schema_version" not in info:
        raise LabError(f"{path}: schema_version is missing, expected {SCHEMA_VERSION}")
    return _versioned(info, str(path))


def open_folder(folder: Path, info: Mapping[str, Any]) -> None:
    """Start a run in `folder`, or check that the one already there has the settings of `info`.

    What may differ between a run and its continuation is not compared: `environment`, `complete`.

    Raises:
        LabError: tables without run.json, a training, or a run of other settings.
    """
    if not (folder / RUN_INFO_FILE).is_file():
        check_unclaimed(folder)
        write_run_info(folder, info)
        return
    found = read_run_info(folder)
    for key, value in info.items():
        if key not in ("environment", "complete") and found.get(key) != value:
            raise LabError(
                f"{folder}: holds another run, {key} is {found.get(key)!r} there and {value!r} "
                "here; choose another folder or delete this one"
            )


def check_unclaimed(folder: Path) -> None:
    """Raise LabError for a folder that holds a training, or tables without run.json."""
    if (folder / CHECKPOINT_FILE).is_file():
        raise LabError(f"{folder}: holds a training; choose another folder")
    if any(folder.glob("*.parquet")) and not (folder / RUN_INFO_FILE).is_file():
        raise LabError(f"{folder}: holds tables but no {RUN_INFO_FILE}; choose another folder")


def _versioned(info: Mapping[str, Any], where: str) -> dict[str, Any]:
    version = info.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise LabError(
            f"{where}: found schema_version {version!r}, expected {SCHEMA_VERSION}; "
            f"record the run again with this version of dflash2_lab"
        )
    return {**info, "schema_version": SCHEMA_VERSION}


def file_hash(path: Path) -> str:
    """Return the sha256 of a file as 64 hexadecimal digits."""
    with Path(path).open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its information and its tables, read from the folder on first use.

    `info` is run.json (command, versions, seeds, hashes). `.traces`, `.anchors`, `.slots`,
    `.paths`, `.attention`, `.candidates` and `.steps` are data frames, columns as in `schema`; one
    that the run does not hold is a LabError (`has_table` asks). `Run.open(folder)` reads a folder.
    """

    info: dict[str, Any]
    folder: Path | None = None
    frames: dict[str, pd.DataFrame] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path | str, kind: str | None = None) -> "Run":
        """Open a run folder (reads run.json only); `kind` is the kind of run that is expected.

        Raises:
            LabError: as `read_run_info`, for another kind, and for a run that was stopped before
                its end: what is there covers only a part of its prompts.
        """
        info = read_run_info(Path(folder))
        found = info.get("kind")
        if kind is not None and found != kind:
            raise LabError(f"{folder}: found a run of kind {found!r}, expected {kind!r}")
        if info.get("complete") is False:
            raise LabError(f"{folder}: the run is unfinished; give its command again to go on")
        return cls(info=info, folder=Path(folder))

    @classmethod
    def in_memory(cls, info: Mapping[str, Any], frames: Mapping[str, pd.DataFrame]) -> "Run":
        """Make a run from frames; they are checked and cast as a written table would be."""
        conformed = {name: conform_frame(frame, name) for name, frame in frames.items()}
        return cls(info=_versioned(info, "run information"), frames=conformed)

    def table(self, name: str) -> pd.DataFrame:
        """Return table `name`. Raises LabError when the run does not hold it."""
        if name not in self.frames:
            schema_of(name)
            if self.folder is None:
                raise LabError(f"run in memory: table {name!r} not found, it has {[*self.frames]}")
            self.frames[name] = read_table(self.folder, name)
        return self.frames[name]

    def has_table(self, name: str) -> bool:
        """Tell whether the run holds table `name`, without reading it."""
        if name in self.frames:
            return True
        return self.folder is not None and any(
            path.is_file() for path in self.folder.glob(f"{name}*.parquet")
        )

    @property
    def traces(self) -> pd.DataFrame:
        """One row per request: prompt and response token ids and log-probabilities."""
        return self.table("traces")

    @property
    def anchors(self) -> pd.DataFrame:
        """One row per recorded block (anchor with at least one slot that has a target token)."""
        return self.table("anchors")

    @property
    def slots(self) -> pd.DataFrame:
        """One row per slot with a target token: its rank among the unary logits, and p."""
        return self.table("slots")

    @property
    def paths(self) -> pd.DataFrame:
        """One row per slot and policy: the path token, hit, and q of the target token."""
        return self.table("paths")

    @property
    def candidates(self) -> pd.DataFrame:
        """One row per slot: candidate ids with unary and pairwise scores (optional table)."""
        return self.table("candidates")

    @property
    def attention(self) -> pd.DataFrame:
        """Sums of attention shares per request, layer, head, slot and context bin."""
        return self.table("attention")

    @property
    def steps(self) -> pd.DataFrame:
        """One row per verify step of a decode."""
        return self.table("steps")

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the recorded policies."""
        return tuple(self._info("policies"))

    @property
    def num_draft(self) -> int:
        """Number of drafted slots per recorded block."""
        return int(self._info("drafter", "num_draft"))

    @property
    def temperature(self) -> float:
        """Sampling temperature of the traces; 0 is greedy."""
        return float(self._info("sampling", "temperature"))

    def _info(self, *keys: str) -> Any:
        value: Any = self.info
        for depth, key in enumerate(keys):
            if not isinstance(value, Mapping) or key not in value:
                name = ".".join(keys[: depth + 1])
                raise LabError(f"{self.folder or 'run in memory'}: run information lacks {name}")
            value = value[key]
        return value


_COMPARED = (
    ("prompt_set_hash", "other prompts, chat template or template options"),
    ("target.name", "another target"),
    ("target.dtype", "another target precision"),
    ("target.quantisation", "another target quantisation"),
    ("sampling", "another sampling law"),
)


def assert_comparable(runs: Mapping[str, Run]) -> tuple[str, ...]:
    """Log a warning for everything that makes acceptance of these runs not comparable.

    Compared are prompts with their template, target, precision, quantisation and sampling.
    Returns the warnings, empty when the runs are comparable.
    """
    warnings = []
    names = list(runs)
    for name in names[1:]:
        for key, meaning in _COMPARED:
            first, other = (_lookup(runs[n].info, key) for n in (names[0], name))
            if first != other:
                warnings.append(
                    f"runs {names[0]!r} and {name!r} differ in {key} ({meaning}): "
                    f"{first!r} and {other!r}"
                )
    for warning in warnings:
        logger.warning(warning)
    return tuple(warnings)


def _lookup(info: Mapping[str, Any], dotted: str) -> Any:
    value: Any = info
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
