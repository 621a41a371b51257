"""Schemas of the tables of a run (columns, order, Arrow types) and the checks against them.

A column that is missing, unknown, null or of another kind is an error when a table is written.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import pyarrow as pa

from dflash2_lab.errors import LabError

SCHEMA_VERSION = 1
NEAREST = 32  # context positions before an anchor that `block_attention` tells apart

_KEY = {"prompt_id": pa.string(), "turn": pa.int32(), "sample": pa.int32()}
_ANCHOR_KEY = _KEY | {"anchor": pa.int32()}
_SLOT_KEY = _ANCHOR_KEY | {"slot": pa.int8()}

SCHEMAS: Mapping[str, pa.Schema] = {
    name: pa.schema(list(columns.items()))
    for name, columns in {
        "traces": _KEY
        | {
            "dataset": pa.string(),
            "prompt_ids": pa.list_(pa.int32()),
            "response_ids": pa.list_(pa.int32()),
            "logprob": pa.list_(pa.float64()),
            "logprob_unfiltered": pa.list_(pa.float64()),
            "finish": pa.string(),
            "on_policy": pa.bool_(),
        },
        "anchors": _ANCHOR_KEY
        | {
            "context_len": pa.int32(),
            "num_slots": pa.int32(),
            "response_len": pa.int32(),
            "finish": pa.string(),
            "dataset": pa.string(),
        },
        "slots": _SLOT_KEY
        | {"target_token": pa.int32(), "target_rank": pa.int32(), "p_target": pa.float64()},
        "paths": _SLOT_KEY
        | {
            "policy": pa.string(),
            "token": pa.int32(),
            "hit": pa.bool_(),
            "q_target": pa.float64(),
        },
        "candidates": _SLOT_KEY
        | {
            "ids": pa.list_(pa.int32()),
            "unary": pa.list_(pa.float32()),
            "pairwise": pa.list_(pa.float32()),
        },
        "attention": _KEY
        | {
            "layer": pa.int8(),
            "head": pa.int16(),
            "slot": pa.int8(),
            "context_bin": pa.string(),
            "sum_context": pa.float64(),
            "sum_anchor": pa.float64(),
            "sum_drafted": pa.float64(),
            "sumsq_within": pa.float64(),
            "sum_uniform": pa.float64(),
            "count": pa.int32(),
        },
        # Whole blocks of a sample of anchors, mean over heads. The shares sum to 1; share_context =
        # older + sum(nearest). `nearest`: the context positions before the anchor, the last one
        # next to it. `block`: the block's own rows, row 0 the anchor, row r at position anchor + r.
        "block_attention": _SLOT_KEY
        | {
            "layer": pa.int8(),
            "share_context": pa.float32(),
            "share_anchor": pa.float32(),
            "share_drafted": pa.float32(),
            "older": pa.float32(),
            "nearest": pa.list_(pa.float32()),
            "block": pa.list_(pa.float32()),
        },
        "steps": _KEY
        | {
            "step": pa.int32(),
            "anchor": pa.int32(),
            "context_len": pa.int32(),
            "num_offered": pa.int32(),
            "num_accepted": pa.int32(),
            "num_accepted_raw": pa.int32(),
            "num_emitted": pa.int32(),
            "terminal": pa.string(),
            "policy": pa.string(),
            "temperature": pa.float64(),
            "weight": pa.float64(),
        },
    }.items()
}


def conform_frame(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return `frame` with the column order and types of `table`, as if written and read back."""
    return to_arrow(frame, table, "frame").to_pandas()


def empty_frame(table: str) -> pd.DataFrame:
    """Return a frame of `table` without rows."""
    return schema_of(table).empty_table().to_pandas()


def schema_of(table: str) -> pa.Schema:
    """Return the schema of `table`. Raises LabError for an unknown name."""
    if table not in SCHEMAS:
        raise LabError(f"table {table!r}: unknown, expected one of {', '.join(SCHEMAS)}")
    return SCHEMAS[table]


def to_arrow(frame: pd.DataFrame, table: str, where: str) -> pa.Table:
    """Convert a frame to the schema of `table`; `where` names the frame in error messages.

    Raises:
        LabError: missing, unknown, null (NaN) or ill-typed column.
    """
    schema = schema_of(table)
    _check_columns(list(frame.columns), table, where)
    columns = []
    for column in schema:
        try:
            columns.append(pa.Array.from_pandas(frame[column.name], type=column.type))
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise LabError(
                f"table {table!r} ({where}), column {column.name!r}: found values that do not fit "
                f"{column.type} ({error})"
            ) from error
    return conform(pa.table(columns, schema=schema), table, where)


def _check_columns(found: Sequence[str], table: str, where: str) -> None:
    expected = schema_of(table).names
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    if missing or len(found) != len(expected):
        raise LabError(
            f"table {table!r} ({where}): missing columns {missing}, unknown columns {unknown}, "
            f"expected {expected}"
        )


def conform(arrow: pa.Table, table: str, where: str) -> pa.Table:
    """Reorder the columns and cast within a kind (int64 to int32), never across kinds.

    Raises:
        LabError: missing, unknown, null or ill-typed column.
    """
    schema = schema_of(table)
    _check_columns(arrow.column_names, table, where)
    columns = []
    for expected in schema:
        column = arrow.column(expected.name)
        name = f"table {table!r} ({where}), column {expected.name!r}"
        if _kind(column.type) != _kind(expected.type):
            raise LabError(f"{name}: found type {column.type}, expected {expected.type}")
        if column.null_count:
            raise LabError(f"{name}: found {column.null_count} null or NaN values, expected none")
        try:
            columns.append(column.cast(expected.type))
        except pa.ArrowException as error:
            raise LabError(
                f"{name}: found values that do not fit {expected.type} ({error})"
            ) from error
    return pa.table(columns, schema=schema)


def _kind(type_: pa.DataType) -> str:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"list of {_kind(type_.value_type)}"
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "string"
    if pa.types.is_integer(type_):
        return "integer"
    return "float" if pa.types.is_floating(type_) else str(type_)
