"""The outcome of a verification: what was run, what was found, and in words what that shows."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash2_lab.losslessness.battery import Budget, smallest_tv
from dflash2_lab.losslessness.statistics import CellTest


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
    """One arm of one configuration of sampling: its size, gates, p-values, what Holm rejects of
    them, and the monitor.

    `noise` is the band of rounding: median and maximum, over the tokens, of the total variation
    between the verifier's law and that of one plain pass. `log_e` is the monitor's last value
    (natural logarithm), `stopped` the tokens at which it reached its level (None: never). `cells`
    has the statistics behind the p-values of cells. `acceptance_length` is tokens a verify step.
    """

    arm: str
    sampling: str
    tokens: int
    drafts: int
    acceptance_length: float
    num_edge: int
    noise: Mapping[str, float]
    checks: tuple[Check, ...]
    pit: Mapping[str, float]
    component: Mapping[str, float]
    cells: Mapping[str, CellTest]
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
    """All arms of one run.

    `configuration` says what was decoded and how, `environment` with which versions, `mutation`
    what the tests catch on the toy (`MutationScore.to_dict`; None: not tried in this run).
    """

    configuration: Mapping[str, Any]
    budget: Budget
    arms: tuple[ArmResult, ...]
    seconds: float
    environment: Mapping[str, Any]
    mutation: Mapping[str, Any] | None = None

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
        cells = {name: test._asdict() for name, test in arm.cells.items()}
        arms.append(asdict(arm) | {"checks": checks, "cells": cells, "passed": arm.passed})
    return finite(
        {
            "passed": certificate.passed,
            "configuration": dict(certificate.configuration),
            "budget": asdict(certificate.budget),
            "smallest_tv": certificate.smallest_tv,
            "arms": arms,
            "seconds": certificate.seconds,
            "environment": dict(certificate.environment),
            "mutation_score": certificate.mutation,
        }
    )


def finite(value: Any) -> Any:
    """The value with None in place of infinities and NaN, which a gate may find and JSON lacks."""
    if isinstance(value, Mapping):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def page(certificate: Certificate) -> str:
    """One readable page."""
    about = certificate.configuration
    budget, verdict = certificate.budget, "passed" if certificate.passed else "FAILED"
    lines = [f"losslessness: {verdict}", ""]
    facts = {name: str(value) for name, value in about.items()}
    facts["alpha"] = (
        f"{budget.alpha:g} for the whole run: "
        f"{budget.pit:g} emitted tokens, {budget.component:g} stages, {budget.monitor:g} monitor, "
        f"divided over {budget.configurations} x {budget.arms} arms"
    )
    facts["versions"] = _versions(certificate.environment)
    if certificate.mutation is not None:
        facts["tests catch"] = mutation_words(certificate.mutation)
    for name, text in facts.items():
        lines += textwrap.wrap(text, 88, initial_indent=f"{name:13s}", subsequent_indent=" " * 13)
    lines.append("")
    for arm in certificate.arms:
        lines += _arm(arm)
    return "\n".join([*lines, *textwrap.wrap(meaning(as_json(certificate)), 88)]) + "\n"


def _versions(environment: Mapping[str, Any]) -> str:
    packages = {"python": environment["python"], **environment["packages"]}
    known = [f"{name} {version}" for name, version in packages.items() if version is not None]
    commit, _, dirty = (environment["git"] or "none").partition("-")
    changed = " with uncommitted changes" if dirty else ""
    return f"{', '.join(known)}; commit {commit[:12]}{changed}; {environment['device']}"


def mutation_words(score: Mapping[str, Any]) -> str:
    """The mutation score of the toy, as in "36 of 36 broken decoders of the toy, ..."."""
    controls = score["controls_passed"] + score["false_alarms"]
    return (
        f"{score['killed']} of {score['total']} broken decoders of the toy, "
        f"{score['killed_by_sampling']} by sampling; {score['controls_passed']} of {controls} "
        "harmless ones pass"
    )


def _arm(arm: ArmResult) -> Sequence[str]:
    lines = [
        f"== {arm.sampling}, {arm.arm} drafter: {arm.tokens} tokens, {arm.drafts} drafts, "
        f"{arm.acceptance_length:.2f} tokens a verify step",
        "",
        f"noise band: TV of two passes {arm.noise['median']:.1e} (median), "
        f"{arm.noise['max']:.1e} (largest)",
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
        line = f"{name:16s}  {value:9.3g}{'  REJECTED' if name in arm.rejected else ''}"
        if name in arm.cells:
            test = arm.cells[name]
            line += f"  chi2 {test.statistic:.1f} on {test.df}, TV of shares {test.tv:.4f}"
        lines.append(line)
    end = "never stopped" if arm.stopped is None else f"STOPPED after {arm.stopped} tokens"
    lines.append(f"{'monitor':16s}  log E = {arm.log_e:.2f}, {end}")
    if arm.num_edge:
        lines.append(f"{arm.num_edge} tokens at the edge of top-k or top-p, by rounding")
    return [*lines, ""]


def meaning(found: Mapping[str, Any]) -> str:
    """What a certificate shows and what it does not, in words; `found` is as of `as_json`."""
    if not found["passed"]:
        faulty = sorted({name for arm in found["arms"] for name in _faults(arm)})
        return (
            f"The decode is not the target's: {', '.join(faulty)}. A right decoder fails a run "
            f"with probability at most {found['budget']['alpha']:g}."
        )
    return (
        "Shown: all gates hold on every step of this run, and no test of the emitted tokens or of "
        "the stages rejects the target's law. A test of one known cell would have seen a shift of "
        f"{found['smallest_tv']:.3f} a token with probability 0.99. Not shown: that there are no "
        "smaller or rarer shifts, nor anything about other prompts, settings or machines, or about "
        "stop tokens, which end no response here."
    )


def _faults(arm: Mapping[str, Any]) -> set[str]:
    found = {check["name"] for check in arm["checks"] if not check["passed"]} | {*arm["rejected"]}
    return found | ({"monitor"} if arm["stopped"] is not None else set())
