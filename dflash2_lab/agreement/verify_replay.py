"""Does a replay tell what a decode does? Both engines against a recording of the same prompts.

Greedy: the prompts are traced and recorded, then decoded by every engine, and what each way emits
and accepts is compared block by block (`block_comparison`); rounding is told from bugs by a noise
band that is measured on the traces (`noise_band`). Sampled: a coupled replay and a live decode are
independent samples of one law, so their accepted counts are tested against each other
(`accepted_counts`).
"""

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dflash2_lab.agreement.accepted_counts import CountTest, compare_counts
from dflash2_lab.agreement.block_comparison import (
    Engine,
    compare_trails,
    decoded_trail,
    replayed_trail,
    trace_requests,
)
from dflash2_lab.agreement.margins import Subject
from dflash2_lab.agreement.noise_band import Judge, Noise, measure_band
from dflash2_lab.decoding.api import decode
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.lean import refusal
from dflash2_lab.decoding.requests import Request
from dflash2_lab.errors import LabError
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import drafter_info
from dflash2_lab.prompts import Prompt, prompt_set_hash
from dflash2_lab.recording import record
from dflash2_lab.replaying import replay
from dflash2_lab.sampling import Sampling
from dflash2_lab.stats import own_policy
from dflash2_lab.tables import Run, open_folder, write_atomic, write_run_info
from dflash2_lab.target import Target
from dflash2_lab.tracing import run_info, trace

VERIFY_FILE = "verify.json"


def verify_replay(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    samples: int = 8,
    policy: str | None = None,
    num_draft: int | None = None,
    batch_size: int = 8,
    max_total: int | None = None,
    out: str | Path | None = None,
    acceptance: str = "token",
) -> dict[str, Any]:
    """Compare decode and replay: greedy at temperature 0, else by their laws.

    Args:
        samples: conversations a prompt and side at temperature > 0.
        policy: how drafts are chosen (None: the drafter's own).
        num_draft: slots verified a step (None: all that the drafter was trained on).
        batch_size: rows of the graph engine, of which it decodes as many together.
        out: run folder for verify.json, the traces and the recording.
        acceptance: the rule of engines and replay, "token" or "block" (Sun et al. 2024).

    Returns:
        Plain JSON values: what was compared, `skipped` lines, and `verdict`: at temperature 0
        "equal", "tie-level" or "bug", else "agree", "inconclusive" or "differ". A "bug" or "differ"
        is a failed check.

    Raises:
        LabError: as `trace`, `record`, `replay` and the engines.
    """
    if policy is None:
        policy = own_policy(drafter.settings.kind)
    if batch_size < 1:
        raise LabError(f"batch_size: found {batch_size}, expected a positive number")
    eager = EagerEngine(target, drafter, policy, num_draft, acceptance)  # or says what does not fit
    window = eager.num_draft
    subject = Subject(target, drafter, policy, window)
    sampling = Sampling(temperature, top_p, top_k)
    why = refusal(target)
    skipped = [] if why is None else [f"graph engine skipped: target {target.name} has {why}"]
    limits = {"max_new_tokens": max_new_tokens, "max_total": max_total}
    options = limits | {"seed": seed, "batch_size": batch_size, "policy": policy}
    options |= {"num_draft": window, "samples": 1 if sampling.greedy else samples}
    options |= {"acceptance": acceptance}
    info = (
        run_info(target, sampling)
        | {"kind": "verify-replay", "drafter": drafter_info(drafter)}
        | options
    )
    info |= {"prompt_set_hash": prompt_set_hash(target, prompts), "num_prompts": len(prompts)}
    with _folder(out) as folder:
        open_folder(folder, info)
        result = _shared(subject, sampling, info) | {"skipped": skipped}
        traces = trace(
            target,
            prompts,
            out=folder / "traces",
            **asdict(sampling),
            **limits,
            seed=seed,
            samples=options["samples"],
        )
        run = record(
            target, drafter, traces, (policy,), folder / "recording", attention=False, seed=seed
        )
        engines = ("eager",) if skipped else ("eager", "graph")
        if sampling.greedy:
            result |= _greedy(subject, traces, run, engines, batch_size, acceptance, limits)
        else:
            made = {"samples": samples, "seed": seed, "batch_size": batch_size, "policy": policy}
            made |= {"num_draft": num_draft, "acceptance": acceptance}
            made |= {**asdict(sampling), **limits}
            replayed = replay(run, policy, window, acceptance, seed).steps
            result |= _sampled(subject, prompts, replayed, engines, made)
        result = json.loads(json.dumps(_plain(result)))
        payload = json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n"
        write_atomic(folder / VERIFY_FILE, lambda handle: handle.write(payload.encode()))
        write_run_info(folder, info | {"verdict": result["verdict"], "complete": True})
    return result


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    """The run folder, or one that is gone afterwards."""
    if out is not None:
        yield Path(out)
        return
    with tempfile.TemporaryDirectory(prefix="dflash2-lab-verify-") as folder:
        yield Path(folder)


def _shared(subject: Subject, sampling: Sampling, info: dict[str, Any]) -> dict[str, Any]:
    return {
        "mode": "greedy" if sampling.greedy else "sampled",
        "target": subject.target.name,
        "drafter": subject.drafter.name,
        "policy": subject.policy,
        "num_draft": subject.num_draft,
        "acceptance": info["acceptance"],
        "dtype": str(subject.target.dtype).removeprefix("torch."),
        "device": info["environment"]["device"],
        "sampling": asdict(sampling),
    }


def _greedy(
    subject: Subject,
    traces: Run,
    run: Run,
    engines: Sequence[str],
    batch_size: int,
    acceptance: str,
    limits: dict[str, Any],
) -> dict[str, Any]:
    rows = list(traces.traces.itertuples(index=False))
    requests = trace_requests(subject, rows, limits)
    made = {name: _engine(name, subject, requests, batch_size, acceptance) for name in engines}
    reference = subject.widened()
    band = measure_band(subject, reference, rows, requests, made.get("graph"))
    judge = Judge(reference, rows, band)
    trails = {name: decoded_trail(name, made[name], rows, requests, judge) for name in engines}
    trails["replay"] = replayed_trail(run, rows, subject.policy, subject.num_draft)
    order = [("eager", "replay"), ("graph", "replay"), ("graph", "eager")]
    pairs = [
        compare_trails(*(trails[name] for name in pair), rows, judge)
        for pair in order
        if pair[0] in trails
    ]
    worst = judge.worst()
    noise = {"target": band.target_noise, "draft": band.draft_noise}
    broken = [
        f"{way}: {kind} scores are off by {part.largest:.3g}, rounding explains {part.limit:.3g}"
        for kind, ways in noise.items()
        for way, part in ways.items()
        if not part.is_rounding
    ]
    totals = {
        name: sum(getattr(pair, name) for pair in pairs)
        for name in ("num_blocks", "num_equal", "num_ties", "num_bugs")
    }
    verdict = "equal" if totals["num_equal"] == totals["num_blocks"] else "tie-level"
    if totals["num_bugs"] or broken or worst["verdict"] == "bug":
        verdict = "bug"
    return {
        "verdict": verdict,
        "engine_pairs": pairs,
        **totals,
        "num_responses": len(rows),
        "num_responses_equal": {name: trails[name].num_equal for name in engines},
        "num_tokens": sum(len(row.response_ids) for row in rows),
        "noise_band": {"target": band.target, "draft": band.draft, "by_scoring": noise},
        "broken_scorings": broken,
        "worst_argmax_gap": worst,
    }


def _engine(
    name: str, subject: Subject, requests: Sequence[Request], batch_size: int, acceptance: str
) -> Engine:
    models, window = (subject.target, subject.drafter, subject.policy), subject.num_draft
    if name == "eager":
        return EagerEngine(*models, window, acceptance)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    return GraphEngine(*models, min(batch_size, len(requests)), longest, window, acceptance)


def _sampled(
    subject: Subject,
    prompts: Sequence[Prompt],
    replayed: pd.DataFrame,
    engines: Sequence[str],
    options: dict[str, Any],
) -> dict[str, Any]:
    models = subject.target, subject.drafter
    outputs = {name: decode(*models, prompts, engine=name, **options) for name in engines}
    ids, samples = [prompt.id for prompt in prompts], options["samples"]
    tests = {
        name: compare_counts(output.steps, replayed, ids, samples, subject.num_draft)
        for name, output in outputs.items()
    }
    verdicts = [test.verdict for test in tests.values()]
    tokens = [output.tokens for output in outputs.values()]
    return {
        "verdict": max(verdicts, key=("agree", "inconclusive", "differ").index),
        "engine_pairs": [_test(name, test) for name, test in tests.items()],
        "num_responses": len(tokens[0]),
        # The engines draw the same random numbers, so they part by rounding only.
        "num_responses_shared": sum(
            len({*map(tuple, row)}) == 1 for row in zip(*tokens, strict=True)
        ),
    }


def _test(name: str, test: CountTest) -> dict[str, Any]:
    return {"ways": (name, "replay"), "verdict": test.verdict, **asdict(test)}


def _plain(value: Any) -> Any:
    """JSON values of dataclasses and mappings; numbers that are not finite become None."""
    if is_dataclass(value):
        extra = {"is_rounding": value.is_rounding} if isinstance(value, Noise) else {}
        return _plain(asdict(value) | extra)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
