"""What an engine is asked and what it answers; the checks and the `steps` table of all engines.

An *anchor* is the index in the response of the last committed token. A verify step at anchor a
drafts the slots a + 1, a + 2, ..., of which the window, the length limit and the first stop token
may cut some off.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dflash2_lab.errors import LabError
from dflash2_lab.models.config import check_against_target
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import check_policies
from dflash2_lab.sampling import Sampling, row_key
from dflash2_lab.schema import conform_frame, empty_frame
from dflash2_lab.target import Target

ROLES = ("accept", "final", "prefill")  # of random numbers, beside the policy's own


@dataclass(frozen=True)
class Request:
    """One response to make.

    `keys` holds a 64-bit key of random numbers for each role: the policy's name (its drafts),
    "accept" (acceptance tests), "final" (one residual or bonus draw a step) and "prefill" (the
    first token). `stop_ids` end the response; the stop token belongs to it.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling
    keys: Mapping[str, int]
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Decoded:
    """One response: its ids (stop token included), accepted slots per step, and why it ended.

    `accepted_raw` is what the verifier accepted within the window it was offered, also beyond a
    stop token; without a drafter it is a 0 for each token after the first.
    """

    response_ids: list[int]
    accepted_raw: list[int]
    finish: str  # "eos" | "length"


def request_keys(
    seed: int, prompt_id: str, turn: int, sample: int, policy: str | None
) -> dict[str, int]:
    """Keys of a request's random numbers by role (no policy: autoregressive)."""
    roles = ROLES if policy is None else (policy, *ROLES)
    return {role: row_key(seed, prompt_id, turn, sample, role) for role in roles}


def verify_window(
    target: Target, drafter: Drafter | None, policy: str | None, num_draft: int | None
) -> int:
    """Slots that are verified a step (None: all that the checkpoint drafts), 0 without a drafter.

    Raises:
        LabError: a drafter of another target or on another device, a policy that it does not have,
            or more slots than it was trained on: those would spoil the earlier ones, too.
    """
    if drafter is None:
        if policy is not None or num_draft is not None:
            raise LabError(
                f"policy {policy!r}, num_draft {num_draft}: found without a drafter, expected none"
            )
        return 0
    check_policies((policy,), drafter.settings.kind)
    size = (target.hidden_size, target.vocab_size, target.num_layers)
    check_against_target(drafter.settings, *size, target.name)
    if drafter.device != target.device:
        raise LabError(
            f"drafter {drafter.name} is on {drafter.device}, its target on {target.device}; "
            "expected one device"
        )
    trained = drafter.settings.num_draft
    window = trained if num_draft is None else num_draft
    if not 1 <= window <= trained:
        raise LabError(
            f"num_draft: found {num_draft}, expected 1 to {trained}, the slots that drafter "
            f"{drafter.name} was trained on"
        )
    return window


def check_request(target: Target, request: Request, policy: str | None) -> None:
    """Raise LabError for a request that cannot be decoded, before anything runs."""
    prompt, limit = request.prompt_ids, target.max_positions
    if not prompt:
        raise LabError("request: its prompt has no token")
    if not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
        raise LabError(
            f"request: prompt ids {min(prompt)} to {max(prompt)} found, target {target.name} has "
            f"0 to {target.vocab_size - 1}"
        )
    if request.max_new_tokens < 1:
        raise LabError(f"max_new_tokens: found {request.max_new_tokens}, expected 1 or more")
    if limit is not None and len(prompt) + request.max_new_tokens > limit:
        raise LabError(
            f"request: prompt of {len(prompt)} tokens and max_new_tokens {request.max_new_tokens} "
            f"found, target {target.name} has {limit} positions"
        )
    wanted = ROLES if policy is None else (policy, *ROLES)
    missing = [role for role in wanted if role not in request.keys]
    if missing:
        raise LabError(f"request: no key of random numbers for {', '.join(missing)}")


def cut_at_end(tokens: Sequence[int], request: Request, length: int) -> list[int]:
    """What leaves a step whose `tokens` follow a response of `length` tokens: up to the length
    limit and the first stop token, that token included."""
    kept = list(tokens)[: request.max_new_tokens - length]
    for index, token in enumerate(kept):
        if token in request.stop_ids:
            return kept[: index + 1]
    return kept


def finish_reason(response: Sequence[int], request: Request) -> str:
    """ "eos", "length", or "" for a response that goes on."""
    if response and response[-1] in request.stop_ids:
        return "eos"
    return "length" if len(response) >= request.max_new_tokens else ""


def steps_frame(
    responses: Iterable[tuple[Mapping[str, Any], int, Decoded]],
    num_draft: int,
    policy: str,
    temperature: float,
) -> pd.DataFrame:
    """The `steps` table of responses that were decoded with a verify window of `num_draft` slots.

    A response comes with its key (prompt_id, turn, sample) and the length of its prompt. Counts
    stop at the end of the response, as those of a replay do. Raises `LabError` for accepted counts
    that do not lead through it.
    """
    shared = {"policy": policy, "temperature": temperature, "weight": 1.0}
    rows = [
        dict(key) | step | shared
        for key, prompt_len, decoded in responses
        for step in _steps(key, prompt_len, decoded, num_draft)
    ]
    return conform_frame(pd.DataFrame(rows), "steps") if rows else empty_frame("steps")


def _steps(
    key: Mapping[str, Any], prompt_len: int, decoded: Decoded, num_draft: int
) -> list[dict[str, Any]]:
    length, anchor = len(decoded.response_ids), 0
    rows = []
    for step, raw in enumerate(decoded.accepted_raw):
        remaining = length - 1 - anchor
        offered, emitted = min(num_draft, remaining), min(raw + 1, remaining)
        cut = remaining < num_draft or emitted < raw + 1
        rows.append(
            {
                "step": step,
                "anchor": anchor,
                "context_len": prompt_len + anchor,
                "num_offered": offered,
                "num_accepted": min(raw, offered),
                "num_accepted_raw": raw,
                "num_emitted": emitted,
                "terminal": decoded.finish if cut else "",
            }
        )
        anchor += emitted
    if anchor != length - 1 or any(row["num_emitted"] < 1 for row in rows):
        raise LabError(
            f"{dict(key)}: accepted counts {decoded.accepted_raw} do not lead through a response "
            f"of {length} tokens"
        )
    return rows
