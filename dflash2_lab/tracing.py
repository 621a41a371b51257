"""Traces: the target's own continuations of prompts, with log p of every token.

Everything later (record, replay) reads them, so the target generates once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas as pd
from tqdm import tqdm

from dflash2_lab.errors import LabError
from dflash2_lab.generate import Continuation, Request, generate
from dflash2_lab.prompts import Prompt, prompt_set_hash, render
from dflash2_lab.provenance import environment
from dflash2_lab.sampling import Sampling, row_key
from dflash2_lab.schema import SCHEMA_VERSION
from dflash2_lab.tables import Run, open_folder, shard_done, write_run_info, write_shard
from dflash2_lab.target import Target

_SHARD_BATCHES = 4  # batches a shard: enough to sort prompts by length, few enough to lose


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, rendered after the target's answers to the turns before."""

    prompt: Prompt
    turn: int
    sample: int
    prompt_ids: list[int]
    max_new_tokens: int

    @property
    def key(self) -> dict[str, Any]:
        """The columns of every table that name the request."""
        return {"prompt_id": self.prompt.id, "turn": self.turn, "sample": self.sample}


class Answer(Protocol):
    """What a target makes of a turn, whatever made it."""

    response_ids: list[int]


AnyAnswer = TypeVar("AnyAnswer", bound=Answer)
Conversation = tuple[Prompt, int]  # a prompt and the number of the sample


def trace(
    target: Target,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    samples: int = 1,
    max_total: int | None = None,
    batch_size: int = 32,
    out: str | Path | None = None,
) -> Run:
    """Let the target answer every turn of every prompt, `samples` times.

    A row's random numbers depend on seed, prompt id, turn, sample and position only.

    Args:
        max_new_tokens: limit of one answer; an end token counts.
        temperature, top_p, top_k: of the law that is sampled: temperature, then top-k, then top-p;
            0, 1 and 0 are greedy and without filters.
        max_total: limit of prompt and answer together; the target's positions are one too.
        batch_size: rows a pass. Results do not depend on it, beyond rounding.
        out: run folder. Shards already there, of the same run, are kept and not made again.

    Returns:
        A run of kind `trace` with the table `traces`.

    Raises:
        LabError: bad options, ids that repeat, prompts without room for an answer, a folder that
            holds another run, or a full disk.
    """
    sampling = Sampling(temperature, top_p, top_k)
    for name, count in (
        ("max_new_tokens", max_new_tokens),
        ("samples", samples),
        ("batch_size", batch_size),
    ):
        if count < 1:
            raise LabError(f"{name}: found {count}, expected a positive number")
    check_prompts(target, prompts, max_total)
    limits = {"max_new_tokens": max_new_tokens, "max_total": max_total}
    info = run_info(target, sampling) | limits
    info |= {"origin": "generated", "seed": seed, "samples": samples, "batch_size": batch_size}
    info |= {
        "prompt_set_hash": prompt_set_hash(target, prompts),
        "template": template_info(prompts),
    }
    info |= {"num_prompts": len(prompts), "on_policy": True}
    folder = None if out is None else Path(out)
    if folder is not None:
        open_folder(folder, info)

    jobs = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    size = _SHARD_BATCHES * batch_size
    frames = []
    total = max_new_tokens * sum(len(prompt.turns) for prompt, _ in jobs)
    with tqdm(total=total, desc="trace", unit="token", delay=2.0) as bar:
        for index, start in enumerate(range(0, len(jobs), size)):
            part = jobs[start : start + size]
            if folder is not None and shard_done(folder, ["traces"], index):
                bar.update(max_new_tokens * sum(len(prompt.turns) for prompt, _ in part))
                continue
            frame = _trace_jobs(target, part, sampling, info, bar)
            if folder is None:
                frames.append(frame)
            else:
                write_shard(folder, "traces", index, frame)
    if folder is None:
        return Run.in_memory(
            info | {"complete": True}, {"traces": pd.concat(frames, ignore_index=True)}
        )
    write_run_info(folder, info | {"complete": True})
    return Run.open(folder)


def run_info(target: Target, sampling: Sampling) -> dict[str, Any]:
    """What every run of traces says: target, sampling and the software that made it."""
    return {
        "kind": "trace",
        "schema_version": SCHEMA_VERSION,
        "target": dict(target.identity),
        "eos_token_ids": sorted(target.eos_token_ids),
        "sampling": asdict(sampling),
        "environment": environment(target.device),
        "complete": False,
    }


def template_info(prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
    """The distinct ways in which the prompts are rendered."""
    ways = dict.fromkeys((prompt.system, prompt.template_options) for prompt in prompts)
    return [{"system": system, "options": dict(options)} for system, options in ways]


def check_prompts(target: Target, prompts: Sequence[Prompt], max_total: int | None) -> None:
    """Raise LabError for no prompt, an id that comes twice, or a prompt without room for an
    answer."""
    if not prompts:
        raise LabError("prompts: found no prompt")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise LabError(f"prompts: prompt id {prompt.id!r} comes twice")
        seen.add(prompt.id)
        _room(target, prompt, render(target, prompt), max_total)


def _room(target: Target, prompt: Prompt, ids: Sequence[int], max_total: int | None) -> int:
    """Response tokens that fit behind a rendered prompt."""
    limit = min(x for x in (max_total, target.max_positions, 2**31) if x is not None)
    if len(ids) >= limit:
        raise LabError(
            f"prompt {prompt.id}: {len(ids)} tokens leave no room for an answer, the limit for "
            f"prompt and answer is {limit}"
        )
    return limit - len(ids)


def take_turns(
    target: Target,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    max_total: int | None,
    answer: Callable[[list[Turn]], Sequence[AnyAnswer]],
) -> list[tuple[Turn, AnyAnswer]]:
    """Let `answer` answer every turn: all first turns in one call, then all second ones, and so on.

    A turn follows the target's own answers to the turns before it. Returns turns with their
    answers, conversation by conversation. Raises `LabError` for a turn without room for an answer.
    """
    history: list[list[str]] = [[] for _ in conversations]
    done: list[list[tuple[Turn, AnyAnswer]]] = [[] for _ in conversations]
    for turn in range(max(len(prompt.turns) for prompt, _ in conversations)):
        places, turns = [], []
        for place, (prompt, sample) in enumerate(conversations):
            if len(prompt.turns) > turn:
                ids = render(target, prompt, history[place])
                room = _room(target, prompt, ids, max_total)
                turns.append(Turn(prompt, turn, sample, ids, min(max_new_tokens, room)))
                places.append(place)
        for place, asked, given in zip(places, turns, answer(turns), strict=True):
            done[place].append((asked, given))
            text = target.tokenizer.decode(given.response_ids, skip_special_tokens=True)
            history[place].append(text)
    return [pair for conversation in done for pair in conversation]


def _trace_jobs(
    target: Target,
    jobs: Sequence[Conversation],
    sampling: Sampling,
    info: Mapping[str, Any],
    bar: tqdm,
) -> pd.DataFrame:
    """The `traces` rows of some conversations, in their order."""

    def answer(turns: list[Turn]) -> list[Continuation]:
        requests = [
            Request(turn.prompt_ids, row_key(info["seed"], *turn.key.values()), turn.max_new_tokens)
            for turn in turns
        ]
        bar.total -= sum(info["max_new_tokens"] - turn.max_new_tokens for turn in turns)
        return generate(target, requests, sampling, info["batch_size"], bar.update)

    rows = take_turns(target, jobs, info["max_new_tokens"], info["max_total"], answer)
    return pd.DataFrame(
        turn.key
        | {"dataset": turn.prompt.dataset, "prompt_ids": turn.prompt_ids, "on_policy": True}
        | asdict(continuation)
        for turn, continuation in rows
    )
