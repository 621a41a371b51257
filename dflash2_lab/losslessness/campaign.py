"""The mutation score of the real engine: which faults of the catalogue does `verify` catch in it?

Each fault is decoded with the real models, a response of every arm in turn, until the gates or the
monitor condemn one of them; what gets through the plan is judged by all tests. Of controls, which
are harmless, a third of the responses is decoded, and nothing may speak but what is known to.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from dflash2_lab.losslessness.battery import Budget
from dflash2_lab.losslessness.certificate import finite
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS, find_fault
from dflash2_lab.losslessness.injection import Injected, hooks_of, why_not
from dflash2_lab.losslessness.monitor import log_e_process, stops_at
from dflash2_lab.losslessness.scoring import concat
from dflash2_lab.losslessness.trial import Trial
from dflash2_lab.losslessness.verifying import Plan, lengths, prepare, requests_of
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.prompts import Prompt
from dflash2_lab.sampling import Sampling
from dflash2_lab.target import Target

# The weakest faults (a ratio off by 5 %) show in one token of 60 to 130 under the real drafter:
# measured with SmolLM2, at T = 1 and at T = 0.8, top-p 0.95, top-k 50.
QUICK = Plan(1_200, 12)


@dataclass(frozen=True)
class Attempt:
    """One fault or control in the real engine.

    Attributes:
        name, stage: as in the catalogue.
        harmless: a control.
        skipped: why it changes nothing in this run; "" where it was decoded.
        tokens: decoded in all arms, until it was condemned or to the end.
        arm: the drafter under which it was condemned; None: nothing spoke.
        spoke: what spoke there: gates with what they found, "monitor" with the tokens under this
            drafter at which it stopped, tests with their p-values.
        expected: gates that have to speak though the law of the tokens is right.
    """

    name: str
    stage: str
    harmless: bool
    skipped: str = ""
    tokens: int = 0
    arm: str | None = None
    spoke: Mapping[str, float] | None = None
    expected: tuple[str, ...] = ()

    @property
    def alarmed(self) -> bool:
        """Whether anything spoke that says that the law of the tokens is wrong."""
        return bool({*(self.spoke or ())} - {*self.expected})

    @property
    def passed(self) -> bool:
        """A fault was caught; a control was let through, and what has to speak of it spoke."""
        if not self.harmless:
            return self.alarmed
        return {*(self.spoke or ())} == {*self.expected}


@dataclass(frozen=True)
class Campaign:
    """All attempts of one run. `configuration` says what was decoded and how."""

    configuration: Mapping[str, Any]
    attempts: tuple[Attempt, ...]
    seconds: float

    @property
    def total(self) -> int:
        """Faults tried."""
        return len(self._tried(harmless=False))

    @property
    def killed(self) -> int:
        """Faults caught."""
        return sum(attempt.passed for attempt in self._tried(harmless=False))

    @property
    def controls(self) -> int:
        """Controls tried."""
        return len(self._tried(harmless=True))

    @property
    def controls_passed(self) -> int:
        """Controls let through, with what has to speak of them."""
        return sum(attempt.passed for attempt in self._tried(harmless=True))

    @property
    def false_alarms(self) -> int:
        """Controls said to have the wrong law."""
        return sum(attempt.alarmed for attempt in self._tried(harmless=True))

    @property
    def passed(self) -> bool:
        """Whether every fault was caught and every control passed."""
        return (self.killed, self.controls_passed) == (self.total, self.controls)

    def _tried(self, harmless: bool) -> list[Attempt]:
        tried = [attempt for attempt in self.attempts if not attempt.skipped]
        return [attempt for attempt in tried if attempt.harmless == harmless]


def campaign(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt] | None = None,
    *,
    policy: str | None = None,
    sampling: Sampling = Sampling(1.0),  # noqa: B008 - frozen
    plan: Plan = QUICK,
    names: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda _text: None,
) -> Campaign:
    """Decode under every fault and control of the catalogue, or the named ones, and catch them.

    Arguments and errors are those of `verifying.verify`, with the reference engine. `tell` is given
    each name before its decodes. The plan is what a fault that is not caught takes.

    Raises:
        LabError: an unknown name, and what `verify` raises.
    """
    names = [*FAULTS, *CONTROLS] if names is None else names
    for name in names:
        hooks_of(name)
    prompts, policy = prepare(target, drafter, prompts, policy, (sampling,), plan)
    begun = time.perf_counter()
    sizes = lengths(plan.tokens // len(plan.arms), plan.responses)
    requests = {
        arm: requests_of(target, prompts, sizes, sampling, plan.seed, arm, policy)
        for arm in plan.arms
    }
    attempts = []
    for name in names:
        tell(name)
        reasons = {arm: why_not(name, policy, arm, sampling) for arm in plan.arms}
        entry = {"name": name, "stage": find_fault(name).stage, "harmless": name in CONTROLS}
        if all(reasons.values()):
            attempts.append(Attempt(**entry, skipped=reasons[plan.arms[0]]))
            continue
        trials = {
            arm: Trial(Injected(target, drafter, policy, arm, name), arm, sampling.label)
            for arm, reason in reasons.items()
            if not reason
        }
        expected = tuple(sorted(hooks_of(name).speaks))
        num = math.ceil(plan.responses / 3) if name in CONTROLS else plan.responses
        found = _attempt(trials, requests, num, plan, expected)
        attempts.append(Attempt(**entry, **found, expected=expected))
    configuration = {
        "target": target.name,
        "drafter": drafter.name,
        "policy": policy,
        "engine": "eager",
        "sampling": sampling.label,
        "arms": ", ".join(plan.arms),
        "tokens": sum(sizes) * len(plan.arms),
        "responses": len(sizes) * len(plan.arms),
        "alpha": plan.alpha,
        "seed": plan.seed,
    }
    return Campaign(configuration, tuple(attempts), time.perf_counter() - begun)


def _attempt(
    trials: Mapping[str, Trial],
    requests: Mapping[str, Sequence[Any]],
    num: int,
    plan: Plan,
    expected: Sequence[str],
) -> dict[str, Any]:
    """Decode up to `num` responses an arm, until something unexpected speaks: `tokens`, `arm` and
    `spoke` of an `Attempt`."""
    budget, tokens = Budget(alpha=plan.alpha, arms=len(plan.arms)), 0
    for index, (arm, trial) in product(range(num), trials.items()):
        heard = trial.engine.testify(requests[arm][index])
        trial.hear(index, heard)
        tokens += len(heard.response)
        spoke = _gates(trial) | _monitor(trial, budget, plan.seed)
        if {*spoke} - {*expected}:
            return {"tokens": tokens, "arm": arm, "spoke": spoke}
    found: dict[str, Any] = {"tokens": tokens}
    for arm, trial in trials.items():
        result = trial.judge(budget, plan.seed)
        tests = dict(result.pit) | dict(result.component)
        spoke = _gates(trial) | {name: tests[name] for name in result.rejected}
        if spoke and not {*found.get("spoke", ())} - {*expected}:
            found |= {"arm": arm, "spoke": spoke}
    return found


def _gates(trial: Trial) -> dict[str, float]:
    return {check.name: check.found for check in trial.audit.checks() if not check.passed}


def _monitor(trial: Trial, budget: Budget, seed: int) -> dict[str, float]:
    """The monitor at this look; it may look as often as it likes."""
    emitted = concat([part.emitted for part in trial.parts.values()])
    log_e = log_e_process(emitted, np.random.default_rng([seed, 1]))
    stopped = stops_at(log_e, budget.level("monitor"))
    return {} if stopped is None else {"monitor": float(stopped)}


def as_json(found: Campaign) -> dict[str, Any]:
    """One JSON object: the numbers, then one entry a fault and a control."""
    numbers = ("passed", "killed", "total", "controls_passed", "controls", "false_alarms")
    entries = [asdict(attempt) | {"passed": attempt.passed} for attempt in found.attempts]
    return finite(
        {
            **{name: getattr(found, name) for name in numbers},
            "configuration": dict(found.configuration),
            "mutants": [entry for entry in entries if not entry["harmless"]],
            "controls_tried": [entry for entry in entries if entry["harmless"]],
            "seconds": found.seconds,
        }
    )


def page(found: Campaign) -> str:
    """One readable page."""
    skipped = sum(bool(attempt.skipped) for attempt in found.attempts)
    lines = [
        f"mutation score of the decode: {found.killed} of {found.total} faults caught, "
        f"{found.controls_passed} of {found.controls} harmless controls passed, "
        f"{found.false_alarms} false alarms"
        + (f"; {skipped} change nothing here" if skipped else ""),
        "",
        *(f"{name:12s} {value}" for name, value in found.configuration.items()),
        "",
        f"{'fault':36s}{'stage':16s}{'tokens':>7s}  {'drafter':14s}caught by",
    ]
    lines += [_line(attempt) for attempt in found.attempts if not attempt.harmless]
    lines += ["", f"{'harmless control':36s}{'stage':16s}{'tokens':>7s}  {'drafter':14s}what spoke"]
    lines += [_line(attempt) for attempt in found.attempts if attempt.harmless]
    return "\n".join(lines) + "\n"


def _line(attempt: Attempt) -> str:
    start = f"{attempt.name:36s}{attempt.stage:16s}"
    if attempt.skipped:
        return f"{start}{'-':>7s}  changes nothing: {attempt.skipped}"
    spoke = ", ".join(f"{name} {value:.2g}" for name, value in (attempt.spoke or {}).items())
    wrong = "" if attempt.passed else "  MISSED" if not attempt.harmless else "  FAILED"
    return f"{start}{attempt.tokens:7d}  {attempt.arm or '-':14s}{spoke or 'nothing'}{wrong}"
