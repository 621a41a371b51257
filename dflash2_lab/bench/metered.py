"""A graph engine that keeps the time of its prefills and counts its cycles.

So tokens a second can be told with and without prefills, from the same pass.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dflash2_lab.bench.timing import Mark, mark, seconds, wait
from dflash2_lab.decoding.graph import GraphEngine
from dflash2_lab.decoding.requests import Decoded, Request


@dataclass(frozen=True)
class Pass:
    """One pass over all requests.

    `num_later` tokens came after a response's first one, which its prefill gives; `num_steps` are
    the verify steps of all responses, `num_cycles` the engine's, some of them of ended sequences.
    `wall_seconds` is the host's clock from the first request to the last answer, `prefill_seconds`
    the stream's time in prefills (every sequence waits for them), `decode_seconds` the rest of it.
    """

    num_tokens: int
    num_later: int
    num_steps: int
    num_cycles: int
    wall_seconds: float
    prefill_seconds: float
    decode_seconds: float

    @property
    def decode_rate(self) -> float:
        """Tokens a second, prefills left out on both sides of the ratio."""
        return self.num_later / self.decode_seconds

    @property
    def end_to_end_rate(self) -> float:
        return self.num_tokens / self.wall_seconds

    @property
    def cycle_seconds(self) -> float:
        return self.decode_seconds / self.num_cycles


class MeteredEngine(GraphEngine):
    """`GraphEngine` with a clock; unless negative, `forced` drafts count as accepted each cycle."""

    forced = -1

    def metered(self, requests: Sequence[Request]) -> tuple[list[Decoded], Pass]:
        """Decode all requests and say how long it took."""
        device = self.target.device
        self.num_cycles, self.prefills = 0, list[tuple[Mark, Mark]]()
        wait(device)
        started, first = time.perf_counter(), mark(device)
        answers = self.run(requests)
        last = mark(device)
        wait(device)
        wall = time.perf_counter() - started
        prefill = sum(seconds(*pair) for pair in self.prefills)
        num_tokens = sum(len(answer.response_ids) for answer in answers)
        return answers, Pass(
            num_tokens=num_tokens,
            num_later=num_tokens - len(answers),
            num_steps=sum(len(answer.accepted_raw) for answer in answers),
            num_cycles=self.num_cycles,
            wall_seconds=wall,
            prefill_seconds=prefill,
            decode_seconds=seconds(first, last) - prefill,
        )

    def step(self) -> None:
        self.num_cycles += 1
        super().step()

    def admit(self, places: Sequence[int], requests: Sequence[Request]) -> None:
        first = mark(self.target.device)
        super().admit(places, requests)
        self.cycle.laws.forced.fill_(self.forced)
        self.prefills.append((first, mark(self.target.device)))
