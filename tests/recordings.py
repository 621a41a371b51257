"""Hand-made recordings: a run in memory from small arrays, so that tests can state every number."""

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from dflash2_lab.tables import Run


@dataclass
class Request:
    """One response of R tokens; every array has a row per anchor 0..R-2 and a column per slot.

    `accept[policy]` is the accepted count per anchor (slots 1..n hit, slot n + 1 does not, later
    slots hit again: a `hit` after the first miss must not count). `q[policy]` and `p` are given
    for temperature > 0.
    """

    response_len: int
    accept: dict = field(default_factory=dict)
    q: dict = field(default_factory=dict)
    p: object = 1.0
    rank: object = 0
    prompt_id: str = "a"
    turn: int = 0
    sample: int = 0
    dataset: str = "set"
    finish: str = "length"
    hits: dict = field(default_factory=dict)


def grid(values, num_anchors, num_draft):
    values = np.asarray(values)
    values = values[:, None] if values.ndim == 1 else values
    return np.broadcast_to(values, (num_anchors, num_draft))


def hits_of(accepted, num_anchors, num_draft):
    slot = np.arange(1, num_draft + 1)
    return slot != grid(accepted, num_anchors, num_draft) + 1


def make_run(requests, num_draft, temperature=0.0, kind="dflash2", **info):
    """Return a `Run` in memory with the tables anchors, slots and paths."""
    anchors, slots, paths = [], [], []
    for request in requests:
        num = request.response_len - 1
        if num < 1:
            continue
        key = {"prompt_id": request.prompt_id, "turn": request.turn, "sample": request.sample}
        anchor = np.arange(num)
        num_slots = np.minimum(num_draft, num - anchor)
        anchors.append(
            pd.DataFrame(
                {"anchor": anchor, "context_len": 10 + anchor, "num_slots": num_slots}
            ).assign(**key, response_len=num + 1, finish=request.finish, dataset=request.dataset)
        )
        row, slot = np.nonzero(np.arange(1, num_draft + 1) <= num_slots[:, None])
        cells = pd.DataFrame({"anchor": row, "slot": slot + 1}).assign(**key)
        rank = grid(request.rank, num, num_draft)[row, slot]
        p = grid(request.p, num, num_draft)[row, slot]
        slots.append(cells.assign(target_token=1, target_rank=rank, p_target=p))
        hits = {n: hits_of(a, num, num_draft) for n, a in request.accept.items()} | {
            name: grid(value, num, num_draft) for name, value in request.hits.items()
        }
        for policy in {**hits, **request.q}:
            hit = hits[policy] if policy in hits else np.zeros((num, num_draft), dtype=bool)
            q = grid(request.q.get(policy, 0.0), num, num_draft)
            paths.append(
                cells.assign(
                    policy=policy, token=1, hit=hit[row, slot].astype(bool), q_target=q[row, slot]
                )
            )
    policies = list(dict.fromkeys(p for r in requests for p in {**r.accept, **r.hits, **r.q}))
    frames = {"anchors": anchors, "slots": slots, "paths": paths}
    base = {
        "kind": "record",
        "drafter": {"name": "d", "kind": kind, "num_draft": num_draft},
        "sampling": {"temperature": temperature, "top_p": 1.0, "top_k": 0},
        "policies": policies,
        "anchor_stride": 1,
    }
    return Run.in_memory(
        base | info, {name: pd.concat(parts, ignore_index=True) for name, parts in frames.items()}
    )


def repeat_prompt(run, copies):
    """Return a run with `copies` prompts that are all the one prompt of `run`."""
    names = [f"set/test/{number:05d}" for number in range(copies)]
    frames = {
        name: pd.concat([frame] * copies).assign(prompt_id=np.repeat(names, len(frame)))
        for name, frame in run.frames.items()
    }
    return Run.in_memory(run.info, frames)
