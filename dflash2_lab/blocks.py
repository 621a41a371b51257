"""The recorded blocks of a run as dense arrays: tidy tables in, one row per block out.

A blocks (anchors) are sorted by request, then anchor; Q requests by prompt id, turn, sample;
column j - 1 of every [A, P] array is slot j.
"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int, Shaped

from dflash2_lab.errors import LabError
from dflash2_lab.tables import Run

REQUEST_KEY = ["prompt_id", "turn", "sample"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of one run, cut to a verify window of `num_draft` slots.

    Attributes:
        num_draft: slots of the verify window, P.
        requests: frame of Q requests: prompt_id, turn, sample, dataset.
        cluster: [Q] number of the request's prompt, the cluster of the bootstrap.
        request: [A] row of the block's request in `requests`.
        anchor: [A] index of the anchor in the response.
        context_len: [A] tokens strictly before the anchor.
        remaining: [A] response tokens after the anchor (at least 1).
        finish: [A] how the block's response ended, "eos" or "length".
    """

    num_draft: int
    requests: pd.DataFrame
    cluster: Int[np.ndarray, " Q"]
    request: Int[np.ndarray, " A"]
    anchor: Int[np.ndarray, " A"]
    context_len: Int[np.ndarray, " A"]
    remaining: Int[np.ndarray, " A"]
    finish: Shaped[np.ndarray, " A"]
    _prompts: pd.Index
    _radix: tuple[int, int, int]
    _keys: Int[np.ndarray, " A"]

    @property
    def first(self) -> Int[np.ndarray, " Q"]:
        """Row of each request's first block, [Q]."""
        return np.flatnonzero(np.diff(self.request, prepend=-1))

    @property
    def length(self) -> Int[np.ndarray, " Q"]:
        """Number of blocks of each request, [Q]."""
        return np.bincount(self.request)

    @property
    def offered(self) -> Int[np.ndarray, " A"]:
        """Slots of the window that have a target token, [A]."""
        return np.minimum(self.remaining, self.num_draft)

    @property
    def offered_mask(self) -> Bool[np.ndarray, "A P"]:
        """Which slots have a target token, [A, P]."""
        return np.arange(1, self.num_draft + 1) <= self.offered[:, None]

    @property
    def num_clusters(self) -> int:
        """Number of prompts, C."""
        return len(self._prompts)

    @property
    def block_cluster(self) -> Int[np.ndarray, " A"]:
        """Prompt number of each block, [A]."""
        return self.cluster[self.request]

    def slot_matrix(
        self, frame: pd.DataFrame, column: str, fill: float, what: str
    ) -> Shaped[np.ndarray, "A P"]:
        """Spread `frame[column]` (rows keyed by block and slot) to [A, P]; `fill` elsewhere.

        Raises:
            LabError: a row without a recorded block, or an offered slot without exactly one row.
        """
        rows = self._rows(frame, what)
        slot = frame["slot"].to_numpy().astype(np.int64)
        if ((slot < 1) | (slot > self.remaining[rows])).any():
            raise LabError(f"{what}: found a slot outside 1..num_slots of its block")
        kept = slot <= self.num_draft
        flat = rows[kept] * self.num_draft + slot[kept] - 1
        counts = np.bincount(flat, minlength=len(self.anchor) * self.num_draft)
        wrong = np.flatnonzero(counts != self.offered_mask.ravel())
        if len(wrong):
            row, index = divmod(int(wrong[0]), self.num_draft)
            raise LabError(
                f"{what}: found {counts[wrong[0]]} rows for {self.describe(row)}, slot {index + 1},"
                f" expected 1 ({len(wrong)} such slots)"
            )
        values = frame[column].to_numpy()
        matrix = np.full(len(self.anchor) * self.num_draft, fill, dtype=values.dtype)
        matrix[flat] = values[kept]
        return matrix.reshape(-1, self.num_draft)

    def describe(self, row: int) -> str:
        """Name block `row` for an error message."""
        prompt_id, turn, sample = self.requests.loc[self.request[row], REQUEST_KEY]
        return f"prompt {prompt_id!r}, turn {turn}, sample {sample}, anchor {self.anchor[row]}"

    def _rows(self, frame: pd.DataFrame, what: str) -> Int[np.ndarray, " N"]:
        keys = _block_keys(frame, self._prompts, self._radix)
        rows = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        unknown = np.flatnonzero(self._keys[rows] != keys)
        if len(unknown):
            row = frame.iloc[int(unknown[0])]
            raise LabError(
                f"{what}: found a row for prompt {row['prompt_id']!r}, turn {row['turn']}, sample "
                f"{row['sample']}, anchor {row['anchor']}, which is not in the anchors table"
            )
        return rows


def load_blocks(run: Run, num_draft: int | None = None) -> Blocks:
    """Read the anchors table as `Blocks`, cut to a verify window of `num_draft` (None: all).

    Raises:
        LabError: a window larger than recorded, no block at all, a block twice, or an anchors
            row whose num_slots does not follow from its response length.
    """
    recorded = run.num_draft
    window = recorded if num_draft is None else num_draft
    if not 1 <= window <= recorded:
        raise LabError(
            f"num_draft: found {num_draft}, expected 1 to {recorded} (slots that were recorded; "
            f"a larger window needs another recording)"
        )
    anchors = run.anchors
    if anchors.empty:
        raise LabError(
            "table 'anchors': found no block, so there is no verify step "
            "(every response has at most one token)"
        )
    prompts = pd.Index(np.sort(anchors["prompt_id"].unique().astype(object)))
    radix = tuple(int(anchors[name].max()) + 1 for name in ("turn", "sample", "anchor"))
    keys = _block_keys(anchors, prompts, radix)
    order = np.argsort(keys, kind="stable")
    anchors, keys = anchors.iloc[order].reset_index(drop=True), keys[order]
    remaining = (anchors["response_len"] - 1 - anchors["anchor"]).to_numpy().astype(np.int64)
    _check_anchors(anchors, keys, remaining, recorded)
    first = np.flatnonzero(np.diff(keys // radix[2], prepend=-1))
    sizes = np.diff(first, append=len(keys))
    return Blocks(
        num_draft=window,
        requests=anchors.loc[first, [*REQUEST_KEY, "dataset"]].reset_index(drop=True),
        cluster=keys[first] // (radix[0] * radix[1] * radix[2]),
        request=np.repeat(np.arange(len(first)), sizes),
        anchor=anchors["anchor"].to_numpy().astype(np.int64),
        context_len=anchors["context_len"].to_numpy().astype(np.int64),
        remaining=remaining,
        finish=anchors["finish"].to_numpy(dtype=object),
        _prompts=prompts,
        _radix=radix,
        _keys=keys,
    )


def _check_anchors(
    anchors: pd.DataFrame,
    keys: Int[np.ndarray, " A"],
    remaining: Int[np.ndarray, " A"],
    recorded: int,
) -> None:
    twice = np.flatnonzero(np.diff(keys) == 0)
    if len(twice):
        row = anchors.iloc[int(twice[0])]
        raise LabError(
            f"table 'anchors': prompt {row['prompt_id']!r}, turn {row['turn']}, sample "
            f"{row['sample']}, anchor {row['anchor']} found twice, expected once"
        )
    expected = np.minimum(remaining, recorded)
    wrong = np.flatnonzero((anchors["num_slots"].to_numpy() != expected) | (expected < 1))
    if len(wrong):
        row = anchors.iloc[int(wrong[0])]
        raise LabError(
            f"table 'anchors': prompt {row['prompt_id']!r}, anchor {row['anchor']}: found "
            f"num_slots {row['num_slots']}, expected min({recorded}, response_len - 1 - anchor) "
            f"= {expected[wrong[0]]}, at least 1"
        )


def _block_keys(
    frame: pd.DataFrame, prompts: pd.Index, radix: tuple[int, int, int]
) -> Int[np.ndarray, " N"]:
    """Number each row's block: mixed-radix over prompt, turn, sample, anchor; -1 when unknown."""
    codes, names = pd.factorize(frame["prompt_id"])
    keys = prompts.get_indexer(pd.Index(names.astype(object)))[codes].astype(np.int64)
    known = keys >= 0
    for name, base in zip(("turn", "sample", "anchor"), radix, strict=True):
        digit = frame[name].to_numpy().astype(np.int64)
        known &= (digit >= 0) & (digit < base)
        keys = keys * base + digit
    return np.where(known, keys, -1)
