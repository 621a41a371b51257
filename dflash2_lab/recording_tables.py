"""What was recorded of one trace, as rows of the run's tables.

`values` holds one row an anchor, [n, P] or [n, P, ...], under the names that `record.tile_values`
gives; slots past the end of the trace have no target and become no row.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Float, Int


def anchor_table(
    key: Mapping[str, object], anchors: Int[np.ndarray, " n"], trace: object, num_draft: int
) -> pd.DataFrame:
    """Table `anchors`; `trace` is the trace's row."""
    length = len(trace.response_ids)
    return pd.DataFrame(
        dict(key)
        | {
            "anchor": anchors,
            "context_len": len(trace.prompt_ids) + anchors,
            "num_slots": np.minimum(num_draft, length - 1 - anchors),
            "response_len": length,
            "finish": trace.finish,
            "dataset": trace.dataset,
        }
    )


def slot_tables(
    key: Mapping[str, object],
    anchors: Int[np.ndarray, " n"],
    length: int,
    logprob: Float[np.ndarray, " R"],
    values: Mapping[str, np.ndarray],
    policies: Sequence[str],
) -> dict[str, pd.DataFrame]:
    """Tables `slots`, `paths` and, when `values` has them, `candidates` of one trace: only slots
    that have a target."""
    num_draft = values["target_token"].shape[1]
    index = anchors[:, None] + np.arange(1, num_draft + 1)
    kept = index < length
    rows = dict(key) | {
        "anchor": np.broadcast_to(anchors[:, None], index.shape)[kept],
        "slot": np.broadcast_to(np.arange(1, num_draft + 1), index.shape)[kept],
    }
    target = values["target_token"][kept]
    tables = {
        "slots": pd.DataFrame(
            rows
            | {
                "target_token": target,
                "target_rank": values["target_rank"][kept],
                "p_target": np.exp(logprob[index[kept]]),
            }
        )
    }
    paths = []
    for policy in policies:
        token = values[f"{policy}/token"][kept]
        q_target = values[f"{policy}/q_target"][kept]
        columns = {"policy": policy, "token": token, "hit": token == target, "q_target": q_target}
        paths.append(pd.DataFrame(rows | columns))
    tables["paths"] = pd.concat(paths, ignore_index=True)
    if "candidates/ids" in values:
        tables["candidates"] = pd.DataFrame(rows | _candidate_columns(values, kept))
    return tables


def _candidate_columns(values: Mapping[str, np.ndarray], kept: np.ndarray) -> dict[str, list]:
    """Lists a slot: candidate ids, unary scores, and pairwise scores [previous, own] flattened
    (one row for the first slot, whose predecessor is the anchor; none without a selector)."""
    pairwise: list[np.ndarray] = [np.zeros(0, np.float32)] * int(kept.sum())
    if "candidates/lattice" in values:
        first, lattice = values["candidates/first"], values["candidates/lattice"]
        pairwise = [
            first[row] if slot == 0 else lattice[row, slot - 1].ravel()
            for row, slot in zip(*np.nonzero(kept), strict=True)
        ]
    return {
        "ids": list(values["candidates/ids"][kept]),
        "unary": list(values["candidates/unary"][kept]),
        "pairwise": pairwise,
    }
