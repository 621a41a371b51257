"""The outcome of a greedy verification: noise, gates, the worst gap, and what that shows or not."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash2_lab.losslessness.certificate import Check, finite
from dflash2_lab.report import WIDTH


@dataclass(frozen=True)
class Place:
    """A token of a response, the target's choice there by one-token passes, and a gap below that
    choice, in logits: that of the token or that of the second best, as the field says."""

    prompt_id: str
    position: int
    token: int
    best_token: int
    gap: float


@dataclass(frozen=True)
class WayNoise:
    """How far block passes of one way move the logits of one-token passes, over `num` tokens of the
    target's own text: quantiles of the largest move, the most that rounding explains, and at how
    many tokens the best one changes."""

    way: str
    batch: int
    num: int
    median: float
    quantile_99: float
    quantile_9999: float
    largest: float
    limit: float
    num_changed: int


@dataclass(frozen=True)
class Ladder:
    """The rerun in float64 by the reference engine: responses, the tokens of all arms, how many
    responses differ from plain greedy ones, and the most that block passes move a logit there."""

    responses: int
    tokens: int
    num_different: int
    largest_noise: float


@dataclass(frozen=True)
class GreedyArm:
    """One drafter arm.

    Attributes:
        tokens, num_steps, acceptance_length: what was decoded; tokens a verify step.
        num_flips: emitted tokens that are not the target's choice after the same text.
        expected_flips, flip_tail: what the noise gives, and the chance of so many flips or more.
        worst: the token farthest below the target's choice.
        divergences: where this decode and the target's own one part, taken up again behind ties,
            with the gap of the two best tokens.
        checks: the gates.
    """

    arm: str
    tokens: int
    num_steps: int
    acceptance_length: float
    num_flips: int
    expected_flips: float
    flip_tail: float
    worst: Place
    divergences: tuple[Place, ...]
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class GreedyCertificate:
    """All arms of a greedy run. `control` are the places of the target's own text whose choice
    changes when the target alone reads it in blocks, with the gap of the two best tokens; gaps up
    to 2 `eps` are ties."""

    configuration: Mapping[str, Any]
    eps: float
    noise: tuple[WayNoise, ...]
    control: tuple[Place, ...]
    checks: tuple[Check, ...]
    arms: tuple[GreedyArm, ...]
    ladder: Ladder
    acceptance_deterministic: bool
    seconds: float

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the gates that failed, of the run and of its arms."""
        found = [check.name for check in self.checks if not check.passed]
        found += [
            f"{check.name} ({arm.arm})"
            for arm in self.arms
            for check in arm.checks
            if not check.passed
        ]
        return tuple(found)

    @property
    def passed(self) -> bool:
        """Whether no gate failed."""
        return not self.failed

    @property
    def verdict(self) -> str:
        """ "bug"; else "tie-level" where some token is not the target's own; else "equal"."""
        if self.failed:
            return "bug"
        same = all(not arm.num_flips and not arm.divergences for arm in self.arms)
        return "equal" if same else "tie-level"

    @property
    def worst(self) -> Place:
        """The emitted token of all arms that lies farthest below the target's choice."""
        return max((arm.worst for arm in self.arms), key=lambda place: place.gap)


def as_json(certificate: GreedyCertificate) -> dict[str, Any]:
    """One JSON object."""
    found = asdict(certificate) | {"configuration": dict(certificate.configuration)}
    for record, arm in zip(found["arms"], certificate.arms, strict=True):
        record["checks"] = _checks(arm.checks)
        record["worst_argmax_gap"] = record.pop("worst")
    found |= {
        "checks": _checks(certificate.checks),
        "passed": certificate.passed,
        "failed": list(certificate.failed),
        "verdict": certificate.verdict,
        "worst_argmax_gap": asdict(certificate.worst),
    }
    return finite(found)


def _checks(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [asdict(check) | {"passed": check.passed} for check in checks]


def page(certificate: GreedyCertificate) -> str:
    """One readable page."""
    passed = "passed" if certificate.passed else "FAILED"
    lines = [f"greedy losslessness: {passed} ({certificate.verdict})", ""]
    lines += [f"{name:12s} {value}" for name, value in certificate.configuration.items()]
    lines += ["", *_noise(certificate), "", *_gates(certificate.checks)]
    for arm in certificate.arms:
        lines += ["", *_arm(arm)]
    worst = certificate.worst
    lines += ["", f"worst_argmax_gap: {worst.gap:.3g}"]
    if worst.gap > 0:
        lines[-1] += (
            f" at prompt {worst.prompt_id}, position {worst.position}: token {worst.token}, best "
            f"{worst.best_token}"
        )
    lines += ["", *textwrap.wrap(meaning(as_json(certificate)), WIDTH, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _noise(certificate: GreedyCertificate) -> Sequence[str]:
    heads = ("median", "99 %", "99.99 %", "largest")
    title = f"{'noise of':10s}  {'rows':>4s}  {'tokens':>7s}"
    lines = [title + "".join(f"  {head:>9s}" for head in heads) + "  changed choices"]
    for one in certificate.noise:
        values = (one.median, one.quantile_99, one.quantile_9999, one.largest)
        row = f"{one.way:10s}  {one.batch:4d}  {one.num:7d}"
        lines.append(row + "".join(f"  {value:9.3g}" for value in values) + f"  {one.num_changed}")
    eps = certificate.eps
    return [*lines, f"eps {eps:.3g} logits, twice the largest; gaps up to {2 * eps:.3g} are ties"]


def _gates(checks: Sequence[Check]) -> Sequence[str]:
    lines = [f"{'gate':16s}  {'found':>9s}  {'limit':>9s}"]
    for check in checks:
        mark = "" if check.passed else "  FAILED"
        lines.append(
            f"{check.name:16s}  {check.found:9.3g}  {check.limit:9.3g}  {check.meaning}{mark}"
        )
    return lines


def _arm(arm: GreedyArm) -> Sequence[str]:
    return [
        f"== {arm.arm}: {arm.tokens} tokens, {arm.acceptance_length:.2f} a verify step, "
        f"{arm.num_flips} flips where {arm.expected_flips:.3g} are expected (p = "
        f"{arm.flip_tail:.3g})",
        "",
        *_gates(arm.checks),
    ]


def meaning(found: Mapping[str, Any]) -> str:
    """What a greedy certificate shows and what it does not; `found` is as of `as_json`."""
    part = found["configuration"]["float64"]
    if not found["passed"]:
        return (
            f"The decode is not the target's greedy one: {', '.join(found['failed'])}. A mismatch "
            "that the control does not allow is a bug of the logic, not of rounding."
        )
    shown = "every token is the one that the target gives alone, token by token"
    if found["verdict"] == "tie-level":
        shown = "tokens differ from the target's own only by ties inside its noise band"
    steady = "the same" if found["acceptance_deterministic"] else "NOT the same"
    return (
        f"Shown: {shown}, and what ran in float64 ({part}) is plain greedy decoding. Accepted "
        f"counts of repeated runs are {steady}. Not shown: that outside that part no fault moves "
        "choices inside the band as rarely as rounding does, nor anything about other prompts, "
        "settings or machines."
    )
