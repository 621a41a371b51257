"""The mutation score: how many of the catalogue's broken decoders the battery finds on the toy.

Each fault is decoded once, at twice the size of its entry so that no verdict hangs on the seed, and
judged on that run, its first half, its first quarter, ... : the tokens to detection are the
smallest size from which it was found at every size up. What sampling cannot see, the contract "the
law reported is the law drawn from" must. The harmless controls must pass.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.battery import (
    Budget,
    Drafted,
    Emitted,
    component_tests,
    holm,
    pit_tests,
)
from dflash2_lab.losslessness.faults import CONTROLS, FAULTS, Fault, find_fault
from dflash2_lab.losslessness.monitor import log_e_process
from dflash2_lab.losslessness.scoring import Scores
from dflash2_lab.losslessness.toy import Toy, make_toy
from dflash2_lab.losslessness.toy_decoding import decode
from dflash2_lab.losslessness.toy_observing import observe_drafts, observe_tokens

NUM_STREAMS = 8
LARGEST = 65_536
DRAW_CONTRACT = "draw_contract"
_SMALLEST = 64
_CONTROL = 32_768
_SAME_LAW = 1e-12


@dataclass(frozen=True)
class Outcome:
    """One decoder under test.

    Attributes:
        name, stage, formula: of the catalogue.
        listed_tokens: the size of its entry; None: it has none.
        num_tokens: emitted tokens of the run that it was judged on.
        tokens: the smallest size at which, and at all larger ones, it was found; None: it passed.
        found_by: the test with the smallest p-value there, or "draw_contract".
    """

    name: str
    stage: str
    formula: str
    listed_tokens: int | None
    num_tokens: int
    tokens: int | None
    found_by: str | None


@dataclass(frozen=True)
class MutationScore:
    """Faults that should be found and controls that should not."""

    mutants: tuple[Outcome, ...]
    controls: tuple[Outcome, ...]

    @property
    def total(self) -> int:
        """Faults tried."""
        return len(self.mutants)

    @property
    def killed(self) -> int:
        """Faults found, by sampling or by contract."""
        return sum(mutant.tokens is not None for mutant in self.mutants)

    @property
    def killed_by_sampling(self) -> int:
        """Faults found from emitted tokens and the log alone."""
        return sum(mutant.found_by not in (None, DRAW_CONTRACT) for mutant in self.mutants)

    @property
    def false_alarms(self) -> int:
        """Harmless controls that were rejected."""
        return sum(control.tokens is not None for control in self.controls)

    @property
    def controls_passed(self) -> int:
        """Harmless controls that were not rejected."""
        return len(self.controls) - self.false_alarms

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the five numbers, then one entry a mutant and a control."""
        return {
            "killed": self.killed,
            "total": self.total,
            "killed_by_sampling": self.killed_by_sampling,
            "false_alarms": self.false_alarms,
            "controls_passed": self.controls_passed,
            "mutants": [asdict(outcome) for outcome in self.mutants],
            "controls": [asdict(outcome) for outcome in self.controls],
        }


def mutation_score(
    names: Sequence[str] | None = None,
    limit: int = LARGEST,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> MutationScore:
    """Run the catalogue, or the named part of it, through the battery on the toy.

    Args:
        names: faults and controls; None: all.
        limit: most emitted tokens of a run; a fault that needs more may pass.
        seed: of everything drawn.
        progress: called with each name before its run.

    Raises:
        LabError: an unknown name, a limit that is not a power of two from 64, or a decoder that
            proposes nothing.
    """
    if limit < _SMALLEST or limit & (limit - 1):
        raise LabError(f"limit: found {limit}, expected a power of two from {_SMALLEST}")
    toy = make_toy()
    mutants, controls = [], []
    for name in [*FAULTS, *CONTROLS] if names is None else names:
        fault = find_fault(name)
        if progress is not None:
            progress(name)
        if name in FAULTS:
            mutants.append(judge(toy, fault, min(2 * (fault.num_tokens or _SMALLEST), limit), seed))
        else:
            controls.append(judge(toy, fault, min(_CONTROL, limit), seed))
    return MutationScore(tuple(mutants), tuple(controls))


def judge(toy: Toy, fault: Fault, num_tokens: int, seed: int = 0) -> Outcome:
    """Decode under a fault and say from how many tokens on the battery finds it."""
    entropy = seed, zlib.crc32(fault.name.encode())
    decoded = decode(toy, fault.rules, num_tokens, num_streams=NUM_STREAMS, seed=entropy)
    emitted = observe_tokens(toy, decoded, num_tokens)
    found = None
    size = num_tokens
    while size >= _SMALLEST:
        noise = np.random.default_rng((*entropy, size))
        drafted = None if fault.rules.block_rule else observe_drafts(toy, decoded, size)
        part = first_tokens(emitted, size // NUM_STREAMS)
        rejected = rejections(p_values(part, drafted, noise))
        if not rejected:
            break
        found, size = (size, rejected[0]), size // 2
    if found is None and decoded.drawn_apart > _SAME_LAW:
        found = NUM_STREAMS, DRAW_CONTRACT  # one block of each stream shows it
    entry = fault.name, fault.stage, fault.formula, fault.num_tokens
    return Outcome(*entry, num_tokens, *(found or (None, None)))


def p_values(
    emitted: Emitted, drafted: Drafted | None, noise: np.random.Generator
) -> dict[str, dict[str, float]]:
    """All tests of one run by tier, as `verify` holds them; the monitor's is 1 / max E."""
    largest = log_e_process(emitted, noise).max(initial=0.0)
    return {
        "pit": pit_tests(emitted, noise),
        "component": component_tests(drafted, noise) if drafted is not None else {},
        "monitor": {"monitor": math.exp(-largest)},
    }


def rejections(
    tiers: Mapping[str, Mapping[str, float]],
    budget: Budget = Budget(),  # noqa: B008 - frozen
) -> list[str]:
    """Tests of one run that reject at the levels of the budget, smallest p-value first."""
    found = {
        name: tests[name]
        for tier, tests in tiers.items()
        for name in holm(tests, budget.level(tier))
    }
    return sorted(found, key=found.get)


def first_tokens(emitted: Emitted, length: int) -> Emitted:
    """The first `length` tokens of every stream."""
    kept = emitted.order < length
    scores = Scores(*(None if part is None else part[kept] for part in emitted.scores))
    return Emitted(scores, *(part[kept] for part in emitted[1:]))
