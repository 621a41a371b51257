"""The outcome of a verification: what was run, what was found, and in words what that shows."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash2_lab.losslessness.battery import Budget, smallest_tv


@dataclass(frozen=True)
class Check:
    """One gate: what was found, its limit, and whether it passed."""

    name: str
    found: float
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether what was found is no more than the limit (NaN fails)."""
        return self.found <= self.limit


@dataclass(frozen=True)
class ArmResult:
    """One arm: its size, gates, p-values, what Holm rejects of them, and the monitor.

    `log_e` is the monitor's last value (natural logarithm), `stopped` the tokens at which it
    reached its level (None: never). `acceptance_length` is tokens a verify step.
    """

    arm: str
    tokens: int
    drafts: int
    acceptance_length: float
    num_edge: int
    checks: tuple[Check, ...]
    pit: Mapping[str, float]
    component: Mapping[str, float]
    rejected: tuple[str, ...]
    log_e: float
    stopped: int | None

    @property
    def passed(self) -> bool:
        """Whether no gate failed, no test was rejected and the monitor did not stop."""
        return (
            all(check.passed for check in self.checks)
            and not self.rejected
            and self.stopped is None
        )


@dataclass(frozen=True)
class Certificate:
    """All arms of one run. `configuration` says what was decoded and how."""

    configuration: Mapping[str, Any]
    budget: Budget
    arms: tuple[ArmResult, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every arm passed."""
        return all(arm.passed for arm in self.arms)

    @property
    def smallest_tv(self) -> float:
        """The smallest total variation per token that an arm's tokens could have shown."""
        level = self.budget.level("pit")  # divided by the tests: the first step of Holm
        return max(smallest_tv(arm.tokens, level / len(arm.pit)) for arm in self.arms)


def as_json(certificate: Certificate) -> dict[str, Any]:
    """One JSON object."""
    arms = []
    for arm in certificate.arms:
        checks = [asdict(check) | {"passed": check.passed} for check in arm.checks]
        arms.append(asdict(arm) | {"checks": checks, "passed": arm.passed})
    return {
        "passed": certificate.passed,
        "configuration": dict(certificate.configuration),
        "budget": asdict(certificate.budget),
        "smallest_tv": certificate.smallest_tv,
        "arms": arms,
        "seconds": certificate.seconds,
    }


def page(certificate: Certificate) -> str:
    """One readable page."""
    about = certificate.configuration
    budget, verdict = certificate.budget, "passed" if certificate.passed else "FAILED"
    lines = [f"losslessness: {verdict}", ""]
    lines += [f"{name:12s} {value}" for name, value in about.items()]
    lines += [
        f"{'alpha':12s} {budget.alpha:g} for the whole run: "
        f"{budget.pit:g} emitted tokens, {budget.component:g} stages, {budget.monitor:g} monitor, "
        f"divided over {budget.arms} arms",
        "",
    ]
    for arm in certificate.arms:
        lines += _arm(arm)
    return "\n".join([*lines, *_meaning(certificate)]) + "\n"


def _arm(arm: ArmResult) -> Sequence[str]:
    lines = [
        f"== {arm.arm}: {arm.tokens} tokens, {arm.drafts} drafts, "
        f"{arm.acceptance_length:.2f} tokens a verify step",
        "",
        f"{'gate':16s}  {'found':>9s}  {'limit':>9s}",
    ]
    for check in arm.checks:
        mark = "" if check.passed else "  FAILED"
        lines.append(
            f"{check.name:16s}  {check.found:9.3g}  {check.limit:9.3g}  {check.meaning}{mark}"
        )
    lines += ["", f"{'test':16s}  {'p':>9s}"]
    for name, value in (dict(arm.pit) | dict(arm.component)).items():
        lines.append(f"{name:16s}  {value:9.3g}{'  REJECTED' if name in arm.rejected else ''}")
    end = "never stopped" if arm.stopped is None else f"STOPPED after {arm.stopped} tokens"
    lines.append(f"{'monitor':16s}  log E = {arm.log_e:.2f}, {end}")
    if arm.num_edge:
        lines.append(f"{arm.num_edge} tokens at the edge of top-k or top-p, by rounding")
    return [*lines, ""]


def _meaning(certificate: Certificate) -> Sequence[str]:
    if not certificate.passed:
        faulty = sorted({name for arm in certificate.arms for name in _faults(arm)})
        return [
            f"The decode is not the target's: {', '.join(faulty)}. A right decoder fails a run",
            f"with probability at most {certificate.budget.alpha:g}.",
        ]
    return [
        "Shown: all gates hold on every step of this run, and no test of the emitted tokens or of",
        "the stages rejects the target's law. A shift into one known cell of "
        f"{certificate.smallest_tv:.3f} a token",
        "would have been seen with probability 0.99. Not shown: that there are no smaller or rarer",
        "shifts, nor anything about other prompts, settings or machines.",
    ]


def _faults(arm: ArmResult) -> set[str]:
    found = {check.name for check in arm.checks if not check.passed} | set(arm.rejected)
    return found | ({"monitor"} if arm.stopped is not None else set())
