"""One recorded block as plain data: candidates and scores, the walk through them, the target's
tokens, and what each slot attends to. `viewer` shows it, `plots.draw_block` draws it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash2_lab.errors import LabError
from dflash2_lab.plots.parts import visiting_policy
from dflash2_lab.schema import NEAREST
from dflash2_lab.tables import Run

if TYPE_CHECKING:
    from pandas import DataFrame

    from dflash2_lab.target import Target

NO_CANDIDATES = "run: table 'candidates' not found; record with keep_candidates=True"
VISIBLE = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥"}


def block_view(
    run: Run,
    prompt_id: str,
    turn: int = 0,
    sample: int = 0,
    anchor: int = 0,
    *,
    traces: Run | None = None,
) -> dict[str, Any]:
    """Everything the tables say about one block, as JSON-ready values.

    `anchor_token` and `context` (the positions before it that attention names, nearest last) are
    ids, None where they are unknown: prompt tokens are known from `traces` only. `slots`: one entry
    a slot with a target: `target`, `rank` (0 = first choice), `p_target`, candidate `ids`, `unary`,
    and by policy the path's `token`, `hit`, `q_target` and `scores` (unary and pairwise, after the
    path's token before; None for a policy without pairwise scores). `policies`: the drafter's own
    first. `matched`: by policy, the leading slots where path and target agree; at T = 0 these are
    the accepted drafts. `attention`: by layer a row a slot [older, nearest ..., block ...] of
    shares; [] where none was kept.

    Raises LabError for a block that was not recorded, a run without candidates, or other traces.
    """
    if not run.has_table("candidates"):
        raise LabError(NO_CANDIDATES)
    key = {"prompt_id": prompt_id, "turn": turn, "sample": sample}
    request = _rows(run.anchors, key)
    if request.empty:
        known = ", ".join(map(repr, sorted(set(run.anchors["prompt_id"]))[:5]))
        raise LabError(f"run: found no block of {key}, its prompts are {known}, ...")
    found = request[request["anchor"] == anchor]
    if found.empty:
        last = request["anchor"].max()
        raise LabError(f"run: found no block at anchor {anchor} of {key}, the last is {last}")
    head = found.iloc[0]
    block = key | {"anchor": anchor}
    tokens = _tokens(run, key, head, traces)
    slots = _slots(run, block)
    own = visiting_policy(run, None)
    nearest = range(min(int(head["context_len"]), NEAREST), 0, -1)
    return {
        **block,
        "drafter": str(run.info["drafter"]["name"]),
        "target": str(run.info.get("target", {}).get("name", "unknown")),
        "dataset": str(head["dataset"]),
        "context_len": int(head["context_len"]),
        "response_len": int(head["response_len"]),
        "temperature": run.temperature,
        "policies": sorted(run.policies, key=lambda policy: policy != own),
        "anchor_token": tokens.get(anchor),
        "context": [tokens.get(anchor - back) for back in nearest],
        "slots": slots,
        "matched": {policy: _matched(slots, policy) for policy in run.policies},
        "attention": _attention(run, block),
    }


def _rows(frame: "DataFrame", key: Mapping[str, object]) -> "DataFrame":
    """Rows of a request or a block; the rare columns are compared first."""
    for name, value in reversed(key.items()):
        frame = frame[frame[name] == value]
    return frame


def _tokens(
    run: Run, key: Mapping[str, object], head: Mapping[str, Any], traces: Run | None
) -> dict[int, int]:
    """Known tokens by index in the response (negative: the prompt's), from slots and traces."""
    slots = _rows(run.slots, key)
    index = (slots["anchor"].astype(int) + slots["slot"]).tolist()
    tokens = dict(zip(index, slots["target_token"].tolist(), strict=True))
    if traces is None:
        return tokens
    found = _rows(traces.traces, key)
    if len(found) != 1 or len(found.iloc[0]["response_ids"]) != head["response_len"]:
        raise LabError(f"traces: found no response of {key} with {head['response_len']} tokens")
    prompt, response = (found.iloc[0][name].tolist() for name in ("prompt_ids", "response_ids"))
    known = dict(enumerate([*prompt, *response], start=-len(prompt)))
    if any(known[place] != token for place, token in tokens.items()):
        raise LabError(f"traces: the response of {key} is not the recorded one")
    return known


def _attention(run: Run, block: Mapping[str, object]) -> list[dict[str, Any]]:
    if not run.has_table("block_attention"):
        return []
    rows = _rows(run.table("block_attention"), block).sort_values(["layer", "slot"])
    return [
        {
            "layer": int(layer),
            "rows": [
                [round(float(share), 4) for share in (row.older, *row.nearest, *row.block)]
                for row in part.itertuples(index=False)
            ],
        }
        for layer, part in rows.groupby("layer")
    ]


def _slots(run: Run, block: Mapping[str, object]) -> list[dict[str, Any]]:
    slots = _rows(run.slots, block).sort_values("slot")
    candidates = _rows(run.candidates, block).set_index("slot")
    paths = _rows(run.paths, block).set_index(["policy", "slot"])
    views: list[dict[str, Any]] = []
    for row in slots.itertuples(index=False):
        offered = candidates.loc[row.slot]
        ids, unary = offered["ids"].tolist(), offered["unary"].tolist()
        before = views[-1] if views else None
        view = {
            "slot": int(row.slot),
            "target": int(row.target_token),
            "rank": int(row.target_rank),
            "p_target": _number(row.p_target),
            "ids": ids,
            "unary": [_number(value) for value in unary],
            "paths": {},
        }
        for policy in run.policies:
            path = paths.loc[(policy, row.slot)]
            view["paths"][policy] = {
                "token": int(path["token"]),
                "hit": bool(path["hit"]),
                "q_target": _number(path["q_target"]),
                "scores": _scores(policy, unary, offered["pairwise"], before),
            }
        views.append(view)
    return views


def _scores(
    policy: str, unary: Sequence[float], pairwise: Sequence[float], before: Mapping | None
) -> list[float | None] | None:
    """Unary and pairwise scores of a slot's candidates after the token before on the path."""
    if not policy.startswith("selector"):
        return None
    previous = 0 if before is None else before["ids"].index(before["paths"][policy]["token"])
    row = pairwise[previous * len(unary) : (previous + 1) * len(unary)]
    return [_number(own + pair) for own, pair in zip(unary, row, strict=True)]


def _matched(slots: Sequence[Mapping[str, Any]], policy: str) -> int:
    hits = [slot["paths"][policy]["hit"] for slot in slots]
    return hits.index(False) if False in hits else len(hits)


def _number(value: float) -> float | None:
    """Five significant digits; None for what JSON cannot hold."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


def token_ids(views: Iterable[Mapping[str, Any]]) -> list[int]:
    """Every token id that the views name, ascending."""
    ids: set[int | None] = set()
    for view in views:
        ids |= {view["anchor_token"], *view["context"]}
        for slot in view["slots"]:
            paths = (path["token"] for path in slot["paths"].values())
            ids |= {slot["target"], *slot["ids"], *paths}
    return sorted(ids - {None})


def token_texts(target: "Target | None", ids: Iterable[int]) -> dict[int, str]:
    """What to show for each id: the target's text with its blanks made visible, or "#id"."""
    if target is None:
        return {token: f"#{token}" for token in ids}
    texts = {}
    for token in ids:
        text = target.tokenizer.decode([token])
        # part of a character: the vocabulary's own spelling says more than a replacement mark
        if "\ufffd" in text or not text:
            text = str(target.tokenizer.convert_ids_to_tokens([token])[0] or f"#{token}")
        texts[token] = visible(text)
    return texts


def visible(text: str) -> str:
    """The text with spaces, line ends and other characters that print nothing made visible."""
    shown = (VISIBLE.get(c) or (c if c.isprintable() else f"\\u{ord(c):04x}") for c in text)
    return "".join(shown)
