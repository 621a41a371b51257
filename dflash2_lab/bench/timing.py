"""Repeated timings of several sides in one process, their medians, and intervals without a law.

Sides take turns, and the order rotates from one round to the next, so a slow spell of the machine
hits all of them and no side always runs first. What one side costs more than another is formed
within each round and summed up after that: noise that both share cancels.

Of n independent measurements, each lies below the median of their law with probability 1/2. So the
k-th smallest and the k-th largest enclose that median with probability 1 - 2 P(Bin(n, 1/2) < k),
whatever the law. An interval here is the tightest such pair that reaches 95 %; with fewer than six
measurements it is the smallest and the largest, which enclose it with 1 - 2^(1 - n).
"""

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from tqdm import tqdm

LEVEL = 0.95
WARM_UP = 2  # rounds that are not counted
COPY_BYTES = {"cuda": 2**30, "cpu": 2**25}  # of one buffer: past every cache


Mark = float | torch.cuda.Event  # a point in time: on the host's clock, or of the GPU's stream


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements and the interval around it (see the module's text)."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        ordered, k = sorted(values), order_statistic(len(values))
        return cls(median(ordered), ordered[k - 1], ordered[-k])

    @property
    def half_width(self) -> float:
        """The larger of the interval's two sides, in units of the values."""
        return max(self.high - self.median, self.median - self.low)

    def scaled(self, factor: float) -> "Spread":
        return Spread(self.median * factor, self.low * factor, self.high * factor)

    def text(self, digits: int = 3) -> str:
        low, high = f"{self.low:.{digits}g}", f"{self.high:.{digits}g}"
        return f"{self.median:.{digits}g} [{low}, {high}]"


def order_statistic(num: int, level: float = LEVEL) -> int:
    """The largest k whose interval reaches `level`; 1 when none does."""
    k = 1
    while 2 * (k + 1) <= num and coverage(num, k + 1) >= level:
        k += 1
    return k


def coverage(num: int, k: int) -> float:
    """Probability that the k-th smallest and k-th largest of `num` values enclose the median."""
    return 1 - 2 * sum(math.comb(num, i) for i in range(k)) / 2**num


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Ratio of two sides in each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def differences(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Difference of two sides in each round."""
    return [a - b for a, b in zip(above, below, strict=True)]


def order(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order of round `turn`, each of them first in its turn."""
    first = turn % len(names)
    return [*names[first:], *names[:first]]


def alternate(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Wall-clock seconds of each side in each round, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in tqdm(range(repeats + 1), desc="bench", unit="round", delay=2):
        for name in order(list(work), turn):
            gc.collect()
            started = time.perf_counter()
            work[name]()
            if turn > 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


@dataclass(frozen=True)
class Timed:
    """One side: `step` is what is timed, `reset` goes before each of its turns."""

    step: Callable[[], object]
    reset: Callable[[], object] = lambda: None


def interleaved(
    sides: Mapping[str, Timed], repeats: int, inner: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of one step of each side in each round: the mean of `inner` steps on end.

    A turn is a reset, one step that is not counted (it finds caches that another side left), and
    the counted ones between two marks. On a GPU the marks are events on the stream, and all rounds
    are queued without a look in between, so the host's own time does not count unless it is longer
    than the work's.
    """
    marks: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in sides}
    for turn in tqdm(range(WARM_UP + repeats), desc="bench", unit="round", delay=2, leave=False):
        for name in order(list(sides), turn):
            side = sides[name]
            side.reset()
            side.step()
            first = mark(device)
            for _ in range(inner):
                side.step()
            if turn >= WARM_UP:
                marks[name].append((first, mark(device)))
    wait(device)
    return {name: [seconds(*pair) / inner for pair in pairs] for name, pairs in marks.items()}


def mark(device: torch.device) -> Mark:
    """Now: on the GPU's stream, or on the host's clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(first: Mark, last: Mark) -> float:
    """Seconds between two marks that have passed."""
    if isinstance(first, float):
        return last - first
    return first.elapsed_time(last) / 1e3


def wait(device: torch.device) -> None:
    """Until all queued work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bandwidths(device: torch.device, repeats: int = 20) -> dict[str, Spread]:
    """Bytes a second: "copy" from one large buffer to another, reads and writes both counted, and
    "read" of one (a sum)."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    total = torch.empty((), device=device)

    def read() -> Tensor:
        return torch.sum(source, dim=0, out=total)

    sides = {"copy": Timed(lambda: target.copy_(source)), "read": Timed(read)}
    found = interleaved(sides, repeats, 3, device)
    size = source.numel() * source.element_size()
    moved = {"copy": 2 * size, "read": size}
    return {n: Spread.of([moved[n] / value for value in values]) for n, values in found.items()}
