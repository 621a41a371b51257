"""`verify`: is this decode the target's own law? One run over several drafter arms."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from tqdm import tqdm

from dflash2_lab.decoding.lean import refusal
from dflash2_lab.decoding.requests import Request, request_keys
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.arms import ARMS, check_arms
from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.losslessness.certificate import Certificate
from dflash2_lab.losslessness.injection import Injected
from dflash2_lab.losslessness.trial import Trial
from dflash2_lab.losslessness.witness import Witness
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import check_policies
from dflash2_lab.prompts import Prompt, load_prompts, render
from dflash2_lab.provenance import environment
from dflash2_lab.sampling import Sampling
from dflash2_lab.stats import own_policy
from dflash2_lab.target import Target

LEVELS: Mapping[str, int] = {"pr": 4_096, "nightly": 32_768, "release": 65_536}


@dataclass(frozen=True)
class Plan:
    """How much is decoded: `tokens` in all for each configuration of sampling, divided equally over
    the arms, and there over `responses` of unequal length, `batch_size` of them at a time where the
    engine decodes several together."""

    tokens: int
    responses: int = 24
    arms: tuple[str, ...] = ARMS
    alpha: float = 1e-3
    seed: int = 0
    batch_size: int = 8


def lengths(tokens: int, responses: int) -> list[int]:
    """Response lengths of an arm: unequal, of the given sum."""
    base = tokens // responses
    step = base // 4
    found = [base + step * (index % 3 - 1) for index in range(responses)]
    found[-1] += tokens - sum(found)
    return found


def requests_of(
    target: Target,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    sampling: Sampling,
    seed: int,
    arm: str,
    policy: str,
) -> list[Request]:
    """One request a size; nothing stops a response, so that its number of tokens is fixed."""
    found = []
    for index, (prompt, size) in enumerate(
        zip(islice(cycle(prompts), len(sizes)), sizes, strict=True)
    ):
        sample = index // len(prompts)
        keys = request_keys(seed, f"{arm}/{prompt.id}", 0, sample, policy)
        ids = tuple(render(target, prompt))
        found.append(Request(ids, size, sampling, keys, frozenset()))
    return found


def plan_of(level: str, seed: int = 0) -> Plan:
    """The plan of a level. Raises `LabError` for an unknown one."""
    if level not in LEVELS:
        raise LabError(f"level: found {level!r}, expected one of {', '.join(LEVELS)}")
    return Plan(LEVELS[level], seed=seed)


def verify(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt] | None = None,
    *,
    policy: str | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(1.0),  # noqa: B008 - frozen
    level: str = "pr",
    plan: Plan | None = None,
    acceptance: str = "token",
    engine: str | None = None,
    inject: str | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Certificate:
    """Decode with every arm and hold what leaves against the target's own laws.

    Tests at a temperature above 0, for token-level acceptance and for block verification, on the
    project's own prompts unless others are given. The size is that of `level` ("pr", "nightly",
    "release") or of a plan, for each of the configurations `sampling`. The policy is the drafter's
    own.

    Returns a `Certificate`: `.passed`, `.arms` with their gates and p-values, `.smallest_tv`; as
    text by `losslessness.certificate.page`. docs/losslessness.md explains each gate and test.

    `engine` is "eager" (any target, one row at a time) or "graph" (dense Llama, Qwen2 and Qwen3; on
    a GPU captured); by default the second where it decodes this pair. `inject` plants a fault of
    the catalogue in the eager engine (see `injection`), to see it found.

    Raises:
        LabError: a temperature of 0, arms or a policy that do not fit, no prompts, too few tokens,
            a drafter that proposes nothing, and what the engine raises.
    """
    samplings = (sampling,) if isinstance(sampling, Sampling) else tuple(sampling)
    plan = plan or plan_of(level)
    prompts, policy = prepare(target, drafter, prompts, policy, samplings, plan)
    engine = engine or _own_engine(target, drafter, inject)
    if engine not in ("eager", "graph"):
        raise LabError(f"engine: found {engine!r}, expected 'eager' or 'graph'")
    for name, found, expected in (("acceptance", acceptance, "token"), ("engine", engine, "eager")):
        if inject is not None and found != expected:
            raise LabError(f"inject {inject!r}: found {name} {found!r}, expected {expected!r}")
    begun = time.perf_counter()
    budget = Budget(alpha=plan.alpha, configurations=len(samplings), arms=len(plan.arms))
    make = partial(_witness, engine, target, drafter, policy, acceptance, inject, plan.batch_size)
    sizes = lengths(plan.tokens // len(plan.arms), plan.responses)
    results = []
    for one in samplings:
        for arm in plan.arms:
            tell(f"{one.label}, {arm}: {sum(sizes)} tokens in {len(sizes)} responses")
            requests = requests_of(target, prompts, sizes, one, plan.seed, arm, policy)
            trial = Trial(make(arm, requests), arm, one.label)
            heard = trial.engine.testimonies(requests)
            for index, found in tqdm(heard, arm, len(sizes), unit="response", delay=2.0):
                trial.hear(index, found)
            results.append(trial.judge(budget, plan.seed))
    configuration = {
        "target": target.name,
        "drafter": drafter.name,
        "policy": policy,
        "acceptance": acceptance,
        "engine": engine,
        "inject": inject or "nothing",
        "sampling": "; ".join(one.label for one in samplings),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "tokens": sum(result.tokens for result in results),
        "responses": len(sizes) * len(results),
        "seed": plan.seed,
    }
    seconds = time.perf_counter() - begun
    return Certificate(configuration, budget, tuple(results), seconds, environment(target.device))


def prepare(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt] | None,
    policy: str | None,
    samplings: Sequence[Sampling],
    plan: Plan,
) -> tuple[Sequence[Prompt], str]:
    """Prompts and policy of a run, after all that could be wrong with it. Raises as `verify`."""
    prompts = load_prompts("default") if prompts is None else prompts
    policy = policy or own_policy(drafter.settings.kind)
    check_policies((policy,), drafter.settings.kind)
    check_arms(plan.arms, policy)
    if any(one.greedy for one in samplings):
        raise LabError("temperature: found 0, expected more: `verify_greedy` is for greedy decodes")
    if len(set(samplings)) < len(samplings) or not samplings:
        raise LabError("sampling: found a configuration twice or none, expected some, each once")
    if target.dtype not in (torch.float32, torch.float64):
        raise LabError(
            f"dtype: found {target.dtype}, expected float32: rounding in fewer bits hides what the "
            "gates look for"
        )
    share = plan.tokens // len(plan.arms)
    if not prompts or share < 10 * plan.responses:
        raise LabError(
            f"found {len(prompts)} prompts and {plan.tokens} tokens for {len(plan.arms)} arms, "
            f"expected a prompt and {10 * plan.responses} tokens an arm"
        )
    return prompts, policy


def _own_engine(target: Target, drafter: Drafter, inject: str | None) -> str:
    """The faster one, where it decodes this pair and no fault is planted."""
    lean = refusal(target) is None and drafter.settings.hidden_act == "silu"
    return "graph" if lean and target.dtype == torch.float32 and inject is None else "eager"


def _witness(
    engine: str,
    target: Target,
    drafter: Drafter,
    policy: str,
    acceptance: str,
    inject: str | None,
    batch_size: int,
    arm: str,
    requests: Sequence[Request],
) -> Any:
    if inject is not None:
        return Injected(target, drafter, policy, arm, inject)
    if engine == "eager":
        return Witness(target, drafter, policy, arm, acceptance)
    from dflash2_lab.losslessness.graph_witness import GraphWitness

    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    places = min(batch_size, len(requests))
    return GraphWitness(target, drafter, policy, arm, places, longest, acceptance)
