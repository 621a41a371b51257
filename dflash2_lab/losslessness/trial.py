"""One arm of a verification: its responses are heard one by one, then judged together."""

import numpy as np

from dflash2_lab.losslessness.audit import Audit
from dflash2_lab.losslessness.battery import Budget, component_tests, holm, pit_tests
from dflash2_lab.losslessness.certificate import ArmResult
from dflash2_lab.losslessness.monitor import log_e_process, stops_at
from dflash2_lab.losslessness.scoring import concat
from dflash2_lab.losslessness.statistics import cell_test
from dflash2_lab.losslessness.step_log import side_by_side
from dflash2_lab.losslessness.weighing import Engine, Evidence, weigh
from dflash2_lab.losslessness.witness import Testimony


class Trial:
    """What the responses of one engine under one arm's drafter have left so far.

    Laws and caches, which are large, are looked at as a response is heard and let go.
    """

    def __init__(self, engine: Engine, arm: str, sampling: str):
        self.engine, self.arm, self.sampling = engine, arm, sampling
        self.audit = Audit()
        self.parts: dict[int, Evidence] = {}
        self.num_tokens = self.num_steps = self.num_stepped = 0

    def hear(self, stream: int, found: Testimony) -> None:
        """Weigh a response and look at its gates; `stream` is its number among the responses."""
        log = side_by_side(found.steps)
        evidence = weigh(self.engine, found, log, stream)
        self.audit.see(found, log, evidence)
        self.parts[stream] = evidence
        self.num_tokens += len(found.response)
        self.num_steps += len(found.steps)
        self.num_stepped += len(found.response) - 1

    def judge(self, budget: Budget, seed: int) -> ArmResult:
        """All gates and tests of what was heard."""
        parts = [self.parts[stream] for stream in sorted(self.parts)]
        emitted = concat([part.emitted for part in parts])
        drafted = concat([part.drafted for part in parts])
        noise, monitor_noise = (np.random.default_rng([seed, index]) for index in range(2))
        pit = pit_tests(emitted, noise)
        component = component_tests(drafted, noise)
        rejected = [*holm(pit, budget.level("pit")), *holm(component, budget.level("component"))]
        log_e = log_e_process(emitted, monitor_noise)
        scores = emitted.scores
        cells = {
            "rank_cells": cell_test(scores.rank_cells, scores.rank_cell),
            "drafter_cells": cell_test(scores.drafter_cells, scores.drafter_cell),
        }
        moved = np.concatenate([part.moved for part in parts])
        return ArmResult(
            arm=self.arm,
            sampling=self.sampling,
            tokens=self.num_tokens,
            drafts=len(drafted.reached),
            acceptance_length=self.num_stepped / self.num_steps,
            num_edge=sum(part.num_edge for part in parts),
            noise={"median": float(np.median(moved)), "max": float(moved.max())},
            checks=tuple(self.audit.checks()),
            pit=pit,
            component=component,
            cells=cells,
            rejected=tuple(rejected),
            log_e=float(log_e[-1]),
            stopped=stops_at(log_e, budget.level("monitor")),
        )
