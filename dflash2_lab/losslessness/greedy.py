"""`verify` at temperature 0: is this decode the target's own greedy one, up to rounding?

What rounding may do is measured first, on the target's own greedy text (`forward_noise`). Then each
arm decodes the same prompts, and the gates of an arm are

    regret   no emitted token lies more than 2 eps below the best one, by one-token passes
    prefix   where the decode leaves the target's own text, the two best tokens are within 2 eps
    flips    tokens that are not the best one: no more of them than the noise gives
    control  every such place is one where the target alone, reading blocks, may choose otherwise
    blocks   and the target alone, reading the decode's own blocks, does choose the emitted token

Gates of the run: noise that is rounding, a part of the prompts in float64, where ties vanish and
bugs stay, ties that go to the lowest id, and repeated runs that give the same tokens.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import transformers

from dflash2_lab.agreement.forward_noise import (
    ForwardNoise,
    choices,
    delta,
    in_blocks,
    one_by_one,
)
from dflash2_lab.decoding.eager import EagerEngine
from dflash2_lab.decoding.requests import Decoded, Request
from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.certificate import Check
from dflash2_lab.losslessness.greedy_certificate import (
    GreedyCertificate,
    Ladder,
    WayNoise,
)
from dflash2_lab.losslessness.greedy_gates import Calibration, Case, calibrate, judge, parting
from dflash2_lab.losslessness.greedy_machines import (
    anchors_of,
    decode_texts,
    first_difference,
    fitting_arms,
    make_machines,
)
from dflash2_lab.losslessness.verifying import Plan, lengths, plan_of, requests_of
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.policies import check_policies
from dflash2_lab.prompts import Prompt, load_prompts
from dflash2_lab.sampling import Sampling
from dflash2_lab.stats import own_policy
from dflash2_lab.target import Target

_PART = 8  # one response in so many is run again, in float64 and for repeats
_FLOAT64_BAND = 1e-10  # gap that is an exact tie there; measured noise: 2e-14
_TIE_TOKENS = 24


@torch.inference_mode()
def verify_greedy(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt] | None = None,
    *,
    policy: str | None = None,
    level: str = "pr",
    plan: Plan | None = None,
    acceptance: str = "token",
    engine: str = "eager",
    tell: Callable[[str], None] = lambda _text: None,
) -> GreedyCertificate:
    """Decode greedily with every arm of the plan that the policy and the engine have (the graph
    engine: the realistic one), and hold it against the target's own one-token passes.

    Defaults as those of `verify`. No more responses than there are prompts; nothing stops a
    response. Any floating-point type.

    Returns a `GreedyCertificate` with its verdict: equal, tie-level or bug.

    Raises:
        LabError: an unknown engine, arms or a policy that do not fit, no prompts, too few tokens,
            a drafter that proposes nothing, and what the engine raises.
    """
    begun = time.perf_counter()
    plan = plan or plan_of(level)
    prompts = load_prompts("default") if prompts is None else prompts
    policy = policy or own_policy(drafter.settings.kind)
    models = drafter, policy, acceptance
    case = make_case(target, *models, prompts, plan, engine)
    requests, arms, num = case.requests, tuple(case.machines), len(case.requests)
    share = sum(request.max_new_tokens for request in requests)
    tell(f"the target's own text: {share} tokens in {num} responses")
    found = calibrate(case)
    results, answers = [], {}
    for arm in arms:
        tell(f"{arm}: {share} tokens in {num} responses")
        answers[arm] = decode_texts(case.machines[arm], requests, [own.tokens for own in found.own])
        results.append(judge(case, found, arm, answers[arm], plan.alpha / len(arms)))
    part = requests[::_PART]
    tell(f"float64, ties, repeats: {len(part)} responses")
    ladder = climb(target, *models, arms, part)
    steady, deterministic = repeat(case, found, arms[0], answers[arms[0]])
    configuration = {
        "target": target.name,
        "drafter": drafter.name,
        "policy": policy,
        "engine": engine,
        "acceptance": acceptance,
        "sampling": "T = 0",
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "tokens": share * len(arms),
        "responses": num,
        "contexts": _contexts(requests),
        "float64": f"{ladder.responses} of {num} prompts, {ladder.tokens} tokens, eager engine",
        "alpha": plan.alpha,
        "seed": plan.seed,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    run_checks = (
        *(
            Check(f"noise {one.way}", one.largest, one.limit, "move of a logit, of rounding's most")
            for one in found.noise
        ),
        Check("float64", ladder.num_different, 0, "other tokens than plain greedy's in float64"),
        Check("ties", tied(case), 0, "exact ties that do not go to the lowest id"),
        Check("repeats", steady, 0, "responses with other tokens when run again"),
    )
    return GreedyCertificate(
        configuration=configuration,
        eps=found.eps,
        noise=tuple(map(_summary, found.noise)),
        control=tuple(
            parting(case, found.own[number], number, at, token)
            for (number, at), token in found.control.items()
        ),
        checks=run_checks,
        arms=tuple(results),
        ladder=ladder,
        acceptance_deterministic=deterministic,
        seconds=time.perf_counter() - begun,
    )


def climb(
    target: Target,
    drafter: Drafter,
    policy: str,
    acceptance: str,
    arms: Sequence[str],
    requests: Sequence[Request],
) -> Ladder:
    """Decode in float64 by the reference engine (the other one's kernels add in float32): only an
    exact tie can part from the target's own text there."""
    wide = replace(target, model=copy.deepcopy(target.model).double())
    models = copy.deepcopy(drafter).double(), policy, acceptance
    machines = make_machines(wide, *models, arms, "eager", requests)
    width = machines[arms[0]].num_draft + 1
    own, noise = [], 0.0
    for request in requests:
        text, logits = one_by_one(wide, request.prompt_ids, request.max_new_tokens)
        moved = delta(logits, in_blocks(wide, request.prompt_ids, text, width))
        own.append(choices(text, logits))
        noise = max(noise, float(moved.largest.max()))
    different = tokens = 0
    for machine in machines.values():
        answers = decode_texts(machine, requests, [one.tokens for one in own])
        for one, answer in zip(own, answers, strict=True):
            place = first_difference(one.tokens, answer.response_ids, 0)
            different += place is not None and one.gap[place] > _FLOAT64_BAND
            tokens += len(one.tokens)
    return Ladder(len(requests), tokens, int(different), noise)


def repeat(
    case: Case, found: Calibration, arm: str, answers: Sequence[Decoded]
) -> tuple[int, bool]:
    """Run a part twice more: how many responses have other tokens, and whether all accepted counts
    are the same."""
    part = slice(None, None, _PART)
    texts = [own.tokens for own in found.own[part]]
    other, same = 0, True
    for _ in range(2):
        again = decode_texts(case.machines[arm], case.requests[part], texts)
        for first, now in zip(answers[part], again, strict=True):
            other += first.response_ids != now.response_ids
            same &= first.accepted_raw == now.accepted_raw
    return other, same


def tied(case: Case) -> float:
    """Decode with a head that gives every logit twice: tokens, with or without a drafter, that are
    the higher id of an exact tie. NaN if no tie was seen."""
    target, wrong, seen = case.target, 0, 0
    engines = [EagerEngine(target, None, None), *case.machines.values()]
    first = case.requests[0]
    request = replace(first, max_new_tokens=min(_TIE_TOKENS, first.max_new_tokens))
    with _doubled(target):
        own, logits = one_by_one(target, request.prompt_ids, request.max_new_tokens)
        found = [(own, logits)]
        for engine in engines:
            answer = decode_texts(engine, [request], [own])[0]
            blocks = answer.response_ids, engine.num_draft + 1, anchors_of(answer)
            found.append((answer.response_ids, in_blocks(target, request.prompt_ids, *blocks)))
    for tokens, logits in found:
        best = logits.amax(-1, keepdim=True) == logits
        lowest = best.int().argmax(-1)
        chosen = torch.tensor(tokens, device=logits.device)
        is_tie = best.sum(-1) > 1
        seen += int(is_tie.sum())
        wrong += int((is_tie & best.gather(-1, chosen[:, None])[:, 0] & (chosen != lowest)).sum())
    return float(wrong) if seen else float("nan")


@contextmanager
def _doubled(target: Target) -> Iterator[None]:
    """Rows 2i + 1 of the target's head are those of 2i, inside the context."""
    parts = [part for part in (target.head.weight, getattr(target.head, "bias", None))
             if part is not None]  # fmt: skip
    kept = [part[1::2].clone() for part in parts]
    for part in parts:
        part[1::2] = part[: len(part) // 2 * 2 : 2]
    try:
        yield
    finally:
        for part, rows in zip(parts, kept, strict=True):
            part[1::2] = rows


def make_case(
    target: Target,
    drafter: Drafter,
    policy: str,
    acceptance: str,
    prompts: Sequence[Prompt],
    plan: Plan,
    engine: str,
) -> Case:
    """Requests and engines of a plan. Raises `LabError` for what does not fit."""
    check_policies((policy,), drafter.settings.kind)
    arms = ("realistic",) if engine == "graph" else fitting_arms(plan.arms, policy)
    share, num = plan.tokens // len(arms), min(plan.responses, len(prompts))
    if not num or share < 10 * num:
        raise LabError(
            f"found {len(prompts)} prompts and {plan.tokens} tokens for {len(arms)} arms, "
            f"expected a prompt and {10 * plan.responses} tokens an arm"
        )
    chosen, sizes = prompts[:num], lengths(share, num)
    requests = requests_of(target, chosen, sizes, Sampling(), plan.seed, "greedy", policy)
    machines = make_machines(target, drafter, policy, acceptance, arms, engine, requests)
    return Case(target, [prompt.id for prompt in chosen], requests, machines)


def _summary(one: ForwardNoise) -> WayNoise:
    values = one.delta.largest
    return WayNoise(
        one.way, one.batch, len(values),
        *(float(np.quantile(values, share)) for share in (0.5, 0.99, 0.9999)),
        one.largest, one.limit, int(one.delta.changed.sum()),
    )  # fmt: skip


def _contexts(requests: Sequence[Request]) -> str:
    shortest = min(len(request.prompt_ids) for request in requests)
    longest = max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
    return f"{shortest} to {longest} tokens"
