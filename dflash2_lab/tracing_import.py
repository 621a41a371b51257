"""Traces made elsewhere: log p by teacher forcing, and the check that they are on-policy."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from dflash2_lab.errors import LabError
from dflash2_lab.generate import check_logprobs, pad_left
from dflash2_lab.sampling import Sampling, token_logprobs
from dflash2_lab.tables import Run, open_folder, write_run_info, write_shard
from dflash2_lab.target import Target, positions_from_mask
from dflash2_lab.tracing import run_info

_LOGIT_BYTES = 2**28  # of one pass, in float32
# How far below the best logit a token still ties with it, relative to the best logit's size.
_TIE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-10}

logger = logging.getLogger(__name__)


def import_traces(
    target: Target,
    rows: Iterable[Mapping[str, Any]],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    out: str | Path | None = None,
) -> Run:
    """Take token ids made elsewhere for traces: log p by teacher forcing, and the on-policy check.

    A row is on-policy when every response token has p > 0 under the given sampling; at T = 0, when
    its logit is the best one or within rounding of it (relative 1e-5 in float32, 0.03 in bfloat16).
    Rows that are not are kept with `on_policy` false, and the run says so; it cannot be replayed.

    Args:
        rows: mappings with `prompt_ids`, `response_ids` and `prompt_id`; `turn`, `sample`,
            `dataset` and `finish` as they are known.
        temperature, top_p, top_k: what the responses were sampled with.
        out: run folder; without it the run stays in memory.

    Returns:
        A run of kind `trace` with the table `traces`.

    Raises:
        LabError: an empty response, an id outside the vocabulary, more tokens than the target has
            positions for, tokens after an end token, or a full disk.
    """
    sampling = Sampling(temperature, top_p, top_k)
    records = [_import_row(target, row, number) for number, row in enumerate(rows)]
    if not records:
        raise LabError("imported traces: found no row")
    keys = [(record["prompt_id"], record["turn"], record["sample"]) for record in records]
    if len(set(keys)) < len(keys):
        raise LabError("imported traces: two rows share prompt_id, turn and sample")
    with tqdm(total=len(records), desc="check traces", unit="row", delay=2.0) as bar:
        for batch in _force_batches(target, records):
            _teacher_force(target, batch, sampling)
            bar.update(len(batch))
    off = [record["prompt_id"] for record in records if not record["on_policy"]]
    if off:
        logger.warning(
            "%d of %d imported traces are off-policy for target %s (first: %s)",
            len(off),
            len(records),
            target.name,
            off[0],
        )
    info = run_info(target, sampling) | {"origin": "imported", "on_policy": not off}
    info |= {"prompt_set_hash": _ids_hash(records), "num_prompts": len(records)}
    frame = pd.DataFrame(records)
    if out is None:
        return Run.in_memory(info | {"complete": True}, {"traces": frame})
    folder = Path(out)
    open_folder(folder, info)
    write_shard(folder, "traces", 0, frame)
    write_run_info(folder, info | {"complete": True})
    return Run.open(folder)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows for `import_traces` from a Parquet file or JSON lines.

    Raises:
        LabError: no such file, or one that cannot be read, with the line of a malformed row.
    """
    if not path.is_file():
        raise LabError(f"{path}: no such file, expected Parquet or JSON lines")
    if path.suffix == ".parquet":
        try:
            return pd.read_parquet(path).to_dict("records")
        except (OSError, ValueError) as error:
            raise LabError(f"{path}: not a readable Parquet file ({error})") from error
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise LabError(f"{path}:{number}: not JSON ({error})") from error
        if row is not None and not isinstance(row, dict):
            raise LabError(f"{path}:{number}: found {type(row).__name__}, expected a JSON object")
        rows += [] if row is None else [row]
    return rows


def _import_row(target: Target, row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A checked `traces` row without log-probabilities."""
    name = row.get("prompt_id")
    where = f"imported trace {number}" if name is None else f"imported trace {name}"
    lists = {}
    for key in ("prompt_ids", "response_ids"):
        ids = row.get(key)
        listed = isinstance(ids, list | tuple | np.ndarray)
        if not listed or len(ids) == 0 or not all(map(_is_integer, ids)):
            raise LabError(f"{where}: {key}: found {ids!r}, expected at least one token id")
        lists[key] = [int(token) for token in ids]
        bad = [token for token in lists[key] if not 0 <= token < target.vocab_size]
        if bad:
            raise LabError(
                f"{where}: {key}: id {bad[0]} is outside the vocabulary of {target.vocab_size}"
            )
    response = lists["response_ids"]
    total = len(lists["prompt_ids"]) + len(response)
    if target.max_positions is not None and total > target.max_positions:
        raise LabError(
            f"{where}: {total} tokens, but target {target.name} has {target.max_positions} "
            "positions"
        )
    if any(token in target.eos_token_ids for token in response[:-1]):
        raise LabError(f"{where}: response_ids go on after an end token")
    return {
        "prompt_id": str(number) if name is None else str(name),
        "turn": _count(row, "turn", where),
        "sample": _count(row, "sample", where),
        "dataset": str(row.get("dataset", "imported")),
        "finish": "eos" if response[-1] in target.eos_token_ids else "length",
    } | lists


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _count(row: Mapping[str, Any], key: str, where: str) -> int:
    value = row.get(key)
    value = 0 if value is None else value
    if not _is_integer(value) or value < 0:
        raise LabError(f"{where}: {key}: found {value!r}, expected 0, 1, 2, ...")
    return int(value)


def _force_batches(
    target: Target, records: Sequence[dict[str, Any]]
) -> Iterator[list[dict[str, Any]]]:
    """Records of like length, as many at once as their logits have room."""
    order = sorted(records, key=lambda record: len(record["response_ids"]), reverse=True)
    start = 0
    while start < len(order):
        longest = len(order[start]["response_ids"]) + 1
        size = max(1, _LOGIT_BYTES // (4 * longest * target.vocab_size))
        yield order[start : start + size]
        start += size


@torch.no_grad()
def _teacher_force(target: Target, batch: Sequence[dict[str, Any]], sampling: Sampling) -> None:
    """Add `logprob`, `logprob_unfiltered` and `on_policy` to the records of one batch."""
    rows = [record["prompt_ids"] + record["response_ids"] for record in batch]
    ids, mask = pad_left(rows, min(target.eos_token_ids), target.device)
    longest = max(len(record["response_ids"]) for record in batch)
    # Padded on the left, all responses end in the last column, whose logits come after them.
    logits = target.model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions_from_mask(mask),
        use_cache=False,
        logits_to_keep=longest + 1,
    ).logits[:, :-1]
    tokens = ids[:, -longest:]
    filtered, plain = token_logprobs(logits, tokens, sampling)
    check_logprobs(target, plain[mask[:, -longest:]])
    if sampling.greedy:
        logits = logits.float()
        best = logits.amax(dim=-1)
        own = logits.gather(-1, tokens[..., None]).squeeze(-1)
        allowed = best - own <= _TIE[target.dtype] * best.abs().clamp(min=1.0)
        filtered = torch.where(allowed, 0.0, filtered)
    else:
        allowed = filtered > -torch.inf
    for record, ok, law, free in zip(
        batch, allowed.tolist(), filtered.tolist(), plain.tolist(), strict=True
    ):
        own_slots = slice(longest - len(record["response_ids"]), None)
        record["on_policy"] = all(ok[own_slots])
        record["logprob"] = law[own_slots]
        record["logprob_unfiltered"] = free[own_slots]


def _ids_hash(records: Sequence[Mapping[str, Any]]) -> str:
    rows = sorted(
        [record["prompt_id"], record["turn"], record["sample"], record["prompt_ids"]]
        for record in records
    )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
