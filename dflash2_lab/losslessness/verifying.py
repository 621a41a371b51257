"""`verify`: is this decode the target's own law? One run over several drafter arms."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch
from tqdm import tqdm

from dflash2_lab.decoding.requests import Request, request_keys
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.arms import ARMS, check_arms
from dflash2_lab.losslessness.audit import audit, state_error
from dflash2_lab.losslessness.battery import (
    Budget,
    Drafted,
    Emitted,
    component_tests,
    holm,
    pit_tests,
)
from dflash2_lab.losslessness.certificate import ArmResult, Certificate
from dflash2_lab.losslessness.injection import Injected
from dflash2_lab.losslessness.monitor import log_e_process, stops_at
from dflash2_lab.losslessness.scoring import concat
from dflash2_lab.losslessness.witness import Evidence, Testimony, Witness, weigh
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import check_policies
from dflash2_lab.prompts import Prompt, load_prompts, render
from dflash2_lab.sampling import Sampling
from dflash2_lab.stats import own_policy
from dflash2_lab.target import Target

LEVELS: Mapping[str, int] = {"pr": 4_096, "nightly": 32_768, "release": 65_536}


@dataclass(frozen=True)
class Plan:
    """How much is decoded: `tokens` in all, divided equally over the arms, and there over
    `responses` of unequal length."""

    tokens: int
    responses: int = 24
    arms: tuple[str, ...] = ARMS
    alpha: float = 1e-3
    seed: int = 0


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
    sampling: Sampling = Sampling(1.0),  # noqa: B008 - frozen
    level: str = "pr",
    plan: Plan | None = None,
    acceptance: str = "token",
    inject: str | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Certificate:
    """Decode with every arm and hold what leaves against the target's own laws.

    Tests at a temperature above 0, for token-level acceptance and for block verification (whose
    stages are not tested alone), on the project's own prompts unless others are given. The size is
    that of `level` ("pr", "nightly", "release") or of a plan. The policy is the drafter's own.

    `inject` plants a fault of the catalogue in the verifier (see `injection`), to see it found.

    Raises:
        LabError: a temperature of 0, arms or a policy that do not fit, no prompts, too few tokens,
            a drafter that proposes nothing, and what the engine raises.
    """
    if sampling.greedy:
        raise LabError("temperature: found 0, expected more: greedy decodes are for verify-replay")
    if target.dtype not in (torch.float32, torch.float64):
        raise LabError(
            f"dtype: found {target.dtype}, expected float32: rounding in fewer bits hides what the "
            "gates look for"
        )
    if inject is not None and acceptance != "token":
        raise LabError(f"inject {inject!r}: found acceptance {acceptance!r}, expected 'token'")
    plan = plan or plan_of(level)
    prompts = load_prompts("default") if prompts is None else prompts
    policy = policy or own_policy(drafter.settings.kind)
    check_policies((policy,), drafter.settings.kind)
    check_arms(plan.arms, policy)
    share = plan.tokens // len(plan.arms)
    if not prompts or share < 10 * plan.responses:
        raise LabError(
            f"found {len(prompts)} prompts and {plan.tokens} tokens for {len(plan.arms)} arms, "
            f"expected a prompt and {10 * plan.responses} tokens an arm"
        )
    begun = time.perf_counter()
    budget = Budget(alpha=plan.alpha, arms=len(plan.arms))
    sizes = lengths(share, plan.responses)
    results = []
    for arm in plan.arms:
        tell(f"{arm}: {share} tokens in {len(sizes)} responses")
        requests = requests_of(target, prompts, sizes, sampling, plan.seed, arm, policy)
        if inject is None:
            engine = Witness(target, drafter, policy, arm, acceptance)
        else:
            engine = Injected(target, drafter, policy, arm, inject)
        results.append(_try_arm(engine, requests, budget, plan.seed))
    configuration = {
        "target": target.name,
        "drafter": drafter.name,
        "policy": policy,
        "acceptance": acceptance,
        "inject": inject or "nothing",
        "sampling": f"T = {sampling.temperature:g}, top-p {sampling.top_p:g}, "
        f"top-k {sampling.top_k}",
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "tokens": share * len(plan.arms),
        "seed": plan.seed,
    }
    return Certificate(configuration, budget, tuple(results), time.perf_counter() - begun)


def _try_arm(engine: Witness, requests: Sequence[Request], budget: Budget, seed: int) -> ArmResult:
    facts, evidence, state = [], [], 0.0
    for stream, request in enumerate(tqdm(requests, desc=engine.arm, unit="response", delay=2.0)):
        found = engine.testify(request)
        evidence.append(weigh(engine, found, stream))
        state = max(state, state_error(found))
        facts.append(found)
        _forget(found)
    return judge(engine.arm, facts, evidence, state, budget, seed, engine.acceptance)


def _forget(found: Testimony) -> None:
    """Let go of caches and target laws, which are large; proposals stay for the audit."""
    found.rows = None
    found.steps = [step._replace(laws=step.laws[:0]) for step in found.steps]


def judge(
    arm: str,
    facts: Sequence[Testimony],
    evidence: Sequence[Evidence],
    state: float,
    budget: Budget,
    seed: int,
    acceptance: str,
) -> ArmResult:
    """All tests of one arm."""
    emitted: Emitted = concat([part.emitted for part in evidence])
    drafted: Drafted = concat([part.drafted for part in evidence])
    noise, monitor_noise = (np.random.default_rng([seed, index]) for index in range(2))
    pit = pit_tests(emitted, noise)
    component = component_tests(drafted, noise) if acceptance == "token" else {}
    rejected = [*holm(pit, budget.level("pit")), *holm(component, budget.level("component"))]
    log_e = log_e_process(emitted, monitor_noise)
    verified = sum(len(found.steps) for found in facts)
    emitted_by_steps = sum(len(found.response) - 1 for found in facts)
    return ArmResult(
        arm=arm,
        tokens=sum(len(found.response) for found in facts),
        drafts=len(drafted.reached),
        acceptance_length=emitted_by_steps / verified,
        num_edge=sum(part.num_edge for part in evidence),
        checks=tuple(audit(facts, evidence, state)),
        pit=pit,
        component=component,
        rejected=tuple(rejected),
        log_e=float(log_e[-1]),
        stopped=stops_at(log_e, budget.level("monitor")),
    )
