"""`decode`: prompts in, the target's tokens out, by speculative decoding with either engine.

The acceptance of a decode is measured with the replay's own statistics: its steps are blocks, each
visited once and each with its accepted count for certain.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from dflash2_lab.blocks import REQUEST_KEY, load_blocks
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.requests import (
    Decoded,
    Request,
    request_keys,
    steps_frame,
    verify_window,
)
from dflash2_lab.errors import LabError
from dflash2_lab.intervals import Estimate
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import drafter_info
from dflash2_lab.prompts import Prompt, prompt_set_hash, render
from dflash2_lab.replaying import Walk, acceptance_lengths, path_estimates, request_sums
from dflash2_lab.sampling import Sampling
from dflash2_lab.schema import empty_frame
from dflash2_lab.stats import own_policy
from dflash2_lab.tables import Run, open_folder, write_run_info, write_shard
from dflash2_lab.target import Target
from dflash2_lab.tracing import Turn, check_prompts, run_info, take_turns, template_info

OnTokens = Callable[[Turn, list[int]], None]


@dataclass(frozen=True, eq=False)
class Acceptance:
    """Acceptance of a decode; lengths are tokens emitted per verify step, bonus counted.

    `pooled` is over steps, `per_request` the mean of request means; `_uncut` leaves out the steps
    that a stop token or the length limit cut. `survival` and `conditional_acceptance` are per slot.
    `requests` has the sums per request (tokens, steps, tokens_uncut, steps_uncut) from which the
    lengths can be computed again; requests without a verify step are dropped and counted.
    """

    pooled: Estimate
    per_request: Estimate
    pooled_uncut: Estimate
    per_request_uncut: Estimate
    survival: tuple[Estimate, ...]
    conditional_acceptance: tuple[Estimate, ...]
    num_requests: int
    num_requests_dropped: int
    requests: pd.DataFrame = field(repr=False)


@dataclass(frozen=True, eq=False)
class DecodeResult:
    """What `decode` made.

    Attributes:
        tokens: response ids (stop token included) of every prompt, turn and sample, in the order of
            `requests`.
        texts: the same as text, without special tokens.
        steps: the `steps` table, one row per verify step; empty without a drafter.
        requests: prompt_id, turn, sample, dataset, finish, num_tokens, and seconds: wall clock of
            the host from a response's first token (its prefill is over) to its last.
        acceptance: None when there was no verify step.
        tokens_per_second: tokens that came after a response's first ones, over the seconds in which
            some response was between its first and its last token; None when there is none.
        stop_ids: token ids that end a response: the union over configs and tokenizer.
        engine, policy, num_draft, acceptance_rule: what was run (policy None and num_draft 0: no
            drafter).
    """

    tokens: list[list[int]] = field(repr=False)
    texts: list[str] = field(repr=False)
    steps: pd.DataFrame = field(repr=False)
    requests: pd.DataFrame = field(repr=False)
    acceptance: Acceptance | None
    tokens_per_second: float | None
    stop_ids: tuple[int, ...]
    engine: str
    policy: str | None
    num_draft: int
    acceptance_rule: str


def decode(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    policy: str | None = None,
    engine: str = "eager",
    batch_size: int = 8,
    out: str | Path | None = None,
    num_draft: int | None = None,
    on_tokens: OnTokens | None = None,
    samples: int = 1,
    max_total: int | None = None,
    acceptance: str = "token",
) -> DecodeResult:
    """Answer every turn of every prompt by speculative decoding, `samples` times.

    The responses have the target's own law; at T = 0 they are its greedy ones. A row's random
    numbers depend on seed, prompt id, turn, sample, role and position only.

    Args:
        drafter: None decodes autoregressively.
        max_new_tokens: limit of one response in tokens; a stop token counts.
        temperature, top_p, top_k: of the target's law, in this order: temperature, then top-k, then
            top-p; 0, 1 and 0 are greedy and without filters.
        policy: how drafts are chosen (None: the drafter's own: top1, selector or markov).
        engine: "eager" (any target, one row at a time) or "graph" (CUDA, `batch_size` rows).
        out: run folder for the `steps` table; no text and no token id is written.
        num_draft: slots verified a step, at most those that the drafter was trained on (None).
        on_tokens: told the turn and the tokens of every step (instead of a progress bar).
        max_total: limit of prompt and response together; the target's positions are one too.
        samples: responses to each prompt.
        acceptance: the verifier's rule, "token" or "block" (Sun et al. 2024: accepts more drafts at
            a temperature above 0, with the same law of the tokens).

    Returns:
        Tokens, texts, the `steps` table and acceptance: see `DecodeResult`.

    Raises:
        LabError: bad options, prompts without room for a response, a drafter that does not fit, a
            target that the engine cannot decode, or values that are not finite.
    """
    sampling = Sampling(temperature, top_p, top_k)
    counts = {"max_new_tokens": max_new_tokens, "samples": samples, "batch_size": batch_size}
    for name, count in counts.items():
        if count < 1:
            raise LabError(f"{name}: found {count}, expected a positive number")
    check_prompts(target, prompts, max_total)
    if drafter is not None and policy is None:
        policy = own_policy(drafter.settings.kind)
    window = verify_window(target, drafter, policy, num_draft)
    options = {"engine": engine, "policy": policy, "num_draft": window, "seed": seed}
    options |= counts | {"max_total": max_total, "acceptance": acceptance}
    places = min(batch_size, samples * len(prompts))
    make = partial(_engine, engine, target, drafter, policy, num_draft, acceptance, places)
    capacity = _longest(target, prompts, max_new_tokens, max_total)
    machine = make(capacity)
    if out is not None:
        info = _decode_info(target, drafter, prompts, sampling) | options
        open_folder(Path(out), info)
    num_responses = samples * sum(len(prompt.turns) for prompt in prompts)
    with _Watch(num_responses, target.eos_token_ids, on_tokens) as watch:

        def answer(turns: list[Turn]) -> list[Decoded]:
            nonlocal machine, capacity
            needed = max(len(turn.prompt_ids) + turn.max_new_tokens for turn in turns)
            if needed > capacity:
                machine = None  # gives its memory back before the next one takes more
                machine, capacity = make(needed), needed
            requests = [_request(target, turn, sampling, seed, policy) for turn in turns]
            return machine.run(requests, watch.over(turns))

        conversations = [(prompt, sample) for prompt in prompts for sample in range(samples)]
        pairs = take_turns(target, conversations, max_new_tokens, max_total, answer)
    result = _result(target, pairs, watch, temperature, options)
    if out is not None:
        write_shard(Path(out), "steps", 0, result.steps)
        made = {"num_requests": len(result.tokens), "num_tokens": sum(map(len, result.tokens))}
        made["tokens_per_second"] = result.tokens_per_second
        write_run_info(Path(out), info | made | {"complete": True})
    return result


def steps_acceptance(steps: pd.DataFrame, requests: pd.DataFrame, num_draft: int) -> Acceptance:
    """Acceptance of a `steps` table with a verify window of `num_draft` slots.

    `requests` has the columns prompt_id, turn, sample, dataset, finish and num_tokens, also of
    requests without a step. Raises `LabError` for a table without a row.
    """
    steps = steps.sort_values([*REQUEST_KEY, "anchor"], ignore_index=True)
    frame = steps[[*REQUEST_KEY, "anchor", "context_len"]].merge(requests, on=REQUEST_KEY)
    frame = frame.rename(columns={"num_tokens": "response_len"})
    frame["num_slots"] = np.minimum(num_draft, frame["response_len"] - 1 - frame["anchor"])
    columns = [*REQUEST_KEY, "anchor", "context_len", "num_slots", "response_len"]
    anchors = frame[[*columns, "finish", "dataset"]]
    info = {"drafter": {"num_draft": num_draft}}
    blocks = load_blocks(Run.in_memory(info, {"anchors": anchors}))
    accepted = steps["num_accepted"].to_numpy()[:, None]
    law = (np.arange(num_draft + 1) == accepted).astype(np.float64)
    walk = Walk(blocks, law, np.ones(len(steps)))
    sums = request_sums(walk)
    survival, conditional = path_estimates(walk)
    return Acceptance(
        **acceptance_lengths(sums),
        survival=survival,
        conditional_acceptance=conditional,
        requests=sums,
        num_requests=len(sums),
        num_requests_dropped=len(requests) - len(sums),
    )


class _Watch:
    """Shows progress, passes tokens on, and keeps when each response had its first and last ones.

    `num_later` counts the tokens that came after a response's first ones.
    """

    def __init__(self, total: int, stop_ids: frozenset[int], on_tokens: OnTokens | None):
        self.on_tokens, self.stop_ids = on_tokens, stop_ids
        self.spans: dict[tuple[Any, ...], tuple[float, float]] = {}
        self.num_later = 0
        quiet = on_tokens is not None
        self.bar = tqdm(total=total, desc="decode", unit="response", delay=2.0, disable=quiet)

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def over(self, turns: Sequence[Turn]) -> Callable[[int, list[int]], None]:
        """What an engine tells the tokens of its rows to."""
        left = [turn.max_new_tokens for turn in turns]

        def told(row: int, tokens: list[int]) -> None:
            now, key = time.perf_counter(), tuple(turns[row].key.values())
            self.num_later += len(tokens) if key in self.spans else 0
            self.spans[key] = (self.spans.get(key, (now, now))[0], now)
            left[row] -= len(tokens)
            if left[row] == 0 or tokens[-1] in self.stop_ids:
                self.bar.update()
            if self.on_tokens is not None:
                self.on_tokens(turns[row], tokens)

        return told


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time spans (first, last)."""
    total, until = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, until))
        until = max(until, last)
    return total


def _engine(
    name: str,
    target: Target,
    drafter: Drafter | None,
    policy: str | None,
    num_draft: int | None,
    acceptance: str,
    batch_size: int,
    max_total: int,
) -> Any:
    if name == "eager":
        return EagerEngine(target, drafter, policy, num_draft, acceptance)
    if name == "graph":
        from dflash2_lab.decoding.graph import GraphEngine

        return GraphEngine(target, drafter, policy, batch_size, max_total, num_draft, acceptance)
    raise LabError(f"engine: found {name!r}, expected 'eager' or 'graph'")


def _longest(
    target: Target, prompts: Sequence[Prompt], max_new_tokens: int, max_total: int | None
) -> int:
    """Tokens that the longest conversation comes to, as far as that is known before it.

    Answers return as text in later prompts, usually as no more tokens than they were.
    """
    longest = 0
    for prompt in prompts:
        before = len(prompt.turns) - 1
        own = len(render(target, prompt, [""] * before)) + max_new_tokens
        longest = max(longest, own + before * max_new_tokens)
    return min(n for n in (longest, max_total, target.max_positions) if n is not None)


def _request(
    target: Target, turn: Turn, sampling: Sampling, seed: int, policy: str | None
) -> Request:
    return Request(
        prompt_ids=tuple(turn.prompt_ids),
        max_new_tokens=turn.max_new_tokens,
        sampling=sampling,
        keys=request_keys(seed, *turn.key.values(), policy),
        stop_ids=target.eos_token_ids,
    )


def _decode_info(
    target: Target, drafter: Drafter | None, prompts: Sequence[Prompt], sampling: Sampling
) -> dict[str, Any]:
    """What run.json says beside the options."""
    return run_info(target, sampling) | {
        "kind": "decode",
        "drafter": None if drafter is None else drafter_info(drafter),
        "prompt_set_hash": prompt_set_hash(target, prompts),
        "template": template_info(prompts),
        "num_prompts": len(prompts),
    }


def _result(
    target: Target,
    pairs: Sequence[tuple[Turn, Decoded]],
    watch: _Watch,
    temperature: float,
    options: dict[str, Any],
) -> DecodeResult:
    policy, window = options["policy"], options["num_draft"]
    responses = [(turn.key, len(turn.prompt_ids), decoded) for turn, decoded in pairs]
    table = empty_frame("steps")
    if policy is not None:
        table = steps_frame(responses, window, policy, temperature)
    rows = []
    for turn, decoded in pairs:
        first, last = watch.spans[tuple(turn.key.values())]
        rows.append(
            turn.key
            | {"dataset": turn.prompt.dataset, "finish": decoded.finish}
            | {"num_tokens": len(decoded.response_ids), "seconds": last - first}
        )
    requests = pd.DataFrame(rows)
    tokens = [decoded.response_ids for _, decoded in pairs]
    seconds = busy_seconds(watch.spans.values())
    return DecodeResult(
        tokens=tokens,
        texts=[target.tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens],
        steps=table,
        requests=requests,
        acceptance=None if table.empty else steps_acceptance(table, requests, window),
        tokens_per_second=watch.num_later / seconds if seconds > 0 else None,
        stop_ids=tuple(sorted(target.eos_token_ids)),
        engine=options["engine"],
        policy=policy,
        num_draft=window,
        acceptance_rule=options["acceptance"],
    )
