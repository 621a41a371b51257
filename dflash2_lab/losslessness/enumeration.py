"""Speculative decoding by enumeration: its exact law from the real code, without one random number.

The code draws by comparing uniform numbers u in [0, 1) with thresholds that it computes from p and
q. It is run, unmodified, on `Choices` in place of the numbers: objects that know no value, only the
interval that u must still lie in. Where the code compares u with a threshold inside the interval,
the run forks, once for each side; depth first, until every branch has been run. A branch's weight
is the product of the lengths of its intervals. What the code does to a `Choices` other than scale
it, compare it, or search a CDF for it is an error, so no use of randomness is missed.

Nothing is taken on trust: each branch is run again on real float64 numbers, each 1e-13 inside an
end of its interval (the lower and the upper one by turns), and must do the same there. So the
weights are those of the real code. Only slivers between two thresholds that differ by rounding have
no such numbers.
A number used twice (in a draft and in its test, say) keeps its interval from the first use to the
second, so a reuse shows in the law like any other fault; a reuse across blocks does not.

Of num_blocks consecutive blocks the tokens y_1..l leave with law M; the target extends them,
R(y_1..L) = sum over l of M(y_1..l) prod over i > l of p(y_i | y_<i), L the most that can leave.
Decoding is lossless iff R = P, the target's own law. The real code must run in float64 for a total
variation below 1e-12; `float64` makes it do so.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dflash2_lab.decoding.steps import Accepted, Proposal
from dflash2_lab.errors import LabError

Tokens = tuple[int, ...]
Interval = tuple[float, float]
_INSIDE = 1e-13  # how far inside an interval its ends are run


class Oracle:
    """Takes one side of every threshold, and keeps what that leaves of each uniform number.

    `intervals` are the numbers' own at the start of a branch. A script of sides leads through the
    forks met before; new forks are taken below the threshold first.
    """

    def __init__(self, intervals: Sequence[Interval]):
        self.start = list(intervals)
        self.script: list[bool] = []

    def begin(self) -> None:
        """Start the branch that the script says."""
        self.intervals, self.forks = list(self.start), 0

    def below(self, index: int, threshold: float) -> bool:
        """Whether number `index` is below the threshold in this branch (never below a NaN)."""
        low, high = self.intervals[index]
        if not threshold > low:
            return False
        if threshold >= high:
            return True
        if self.forks == len(self.script):
            self.script.append(True)
        side = self.script[self.forks]
        self.forks += 1
        self.intervals[index] = (low, threshold) if side else (threshold, high)
        return side

    def advance(self) -> bool:
        """Write the script of the next branch; false when there is none."""
        while self.script and not self.script[-1]:
            self.script.pop()
        if not self.script:
            return False
        self.script[-1] = False
        return True


class Choices:
    """Uniform numbers by their places in an oracle, times `scale`: what the real code is run on."""

    def __init__(self, oracle: Oracle, places: Int[Tensor, "*n"], scale: Float[Tensor, "*n"]):
        self.oracle, self.places, self.scale = oracle, places, scale

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: Any) -> "Choices":
        return Choices(self.oracle, self.places[index], self.scale[index])

    def double(self) -> "Choices":
        """Itself: a uniform number is exact."""
        return self

    def __mul__(self, factor: float | Tensor) -> "Choices":
        scale = self.scale * factor
        return Choices(self.oracle, self.places.expand(scale.shape), scale)

    def __lt__(self, bound: Float[Tensor, "*n"]) -> Tensor:
        thresholds = (bound / self.scale).flatten().tolist()
        pairs = zip(self.places.flatten().tolist(), thresholds, strict=True)
        below = [self.oracle.below(place, threshold) for place, threshold in pairs]
        return torch.tensor(below, dtype=torch.bool).view(self.places.shape)

    def search(self, cdf: Float[Tensor, "*rows V"]) -> Int[Tensor, "*rows 1"]:
        """First entry of each row of `cdf` that exceeds its number; V when none does."""
        rows = (cdf / self.scale).reshape(-1, cdf.shape[-1]).tolist()
        pairs = zip(self.places.flatten().tolist(), rows, strict=True)
        found = [
            next((k for k, level in enumerate(row) if self.oracle.below(place, level)), len(row))
            for place, row in pairs
        ]
        return torch.tensor(found).view(self.places.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Tensor:
        if func is torch.searchsorted and kwargs == {"right": True}:
            cdf, level = args
            return level.search(cdf)
        raise LabError(
            f"enumeration: {getattr(func, '__name__', func)} found on uniform numbers, expected "
            "products, comparisons and searches of a CDF only"
        )


class Noise(NamedTuple):
    """The uniform numbers of one block: P drafts, P acceptance tests, a residual or bonus draw."""

    draft: Choices | Float[Tensor, " P"]
    accept: Choices | Float[Tensor, " P"]
    final: Choices | Float[Tensor, ""]

    @classmethod
    def of(cls, numbers: Choices | Float[Tensor, " N"]) -> "Noise":
        """From the N = 2 P + 1 numbers in this order."""
        num_draft = len(numbers) // 2
        return cls(numbers[:num_draft], numbers[num_draft:-1], numbers[-1])


Draft = Callable[[Tokens, Noise], Proposal]
Verify = Callable[[Tokens, Proposal, Noise], Accepted]
TargetLaw = Callable[[Tokens], Sequence[float]]


class BlockLaw(NamedTuple):
    """Law of the tokens that leave one block (one more than the accepted drafts), and how many
    branches it took."""

    law: dict[Tokens, float]
    num_paths: int


def enumerate_block(draft: Draft, verify: Verify, context: Tokens, num_draft: int) -> BlockLaw:
    """Run every branch of one block after the committed tokens `context`.

    Raises `LabError` for code that uses a random number otherwise than by comparing it, or that
    does something else on real numbers.
    """
    law: Counter[Tokens] = Counter()
    num_paths = 0
    numbers = [(0.0, 1.0)] * (2 * num_draft + 1)
    for proposal, drawn in _branches(lambda noise: draft(context, noise), numbers, _path):
        for accepted, left in _branches(
            lambda noise, drafts=proposal: verify(context, drafts, noise), drawn, tuple
        ):
            tokens = (*_path(proposal)[: accepted.num], accepted.token)
            law[tokens] += prod(high - low for low, high in left)
            num_paths += 1
    return BlockLaw(dict(law), num_paths)


def _path(proposal: Proposal) -> Tokens:
    return tuple(proposal.tokens.tolist())


def _branches(
    run: Callable[[Noise], Any], numbers: Sequence[Interval], seen: Callable[[Any], Tokens]
) -> Iterator[tuple[Any, list[Interval]]]:
    """Every outcome of `run` and the intervals of the numbers that lead to it."""
    oracle = Oracle(numbers)
    choices = Choices(oracle, torch.arange(len(numbers)), torch.ones(len(numbers)).double())
    for turn in itertools.count():
        oracle.begin()
        outcome = run(Noise.of(choices))
        if all(high - low > 2 * _INSIDE for low, high in oracle.intervals):
            real = run(Noise.of(_inside(oracle.intervals, turn)))
            if seen(real) != seen(outcome):
                raise LabError(
                    f"enumeration: {seen(outcome)} found by thresholds, {seen(real)} on numbers "
                    f"inside of them, {oracle.intervals}"
                )
        yield outcome, oracle.intervals
        if not oracle.advance():
            return


def _inside(intervals: Sequence[Interval], turn: int) -> Float[Tensor, " N"]:
    """Numbers just inside the ends that have their turn."""
    numbers = [  # the last number forks most often, so its turns change with every branch
        high - _INSIDE if turn >> place & 1 else low + _INSIDE
        for place, (low, high) in enumerate(reversed(intervals))
    ]
    return torch.tensor(numbers[::-1], dtype=torch.float64)


@dataclass(frozen=True)
class Law:
    """What left `num_blocks` blocks, held against the target's own law.

    Attributes:
        total_variation: between R (see the module's first lines) and the target's law.
        conditional: (context, tokens of a block so far) to the total variation of the block's next
            token, given that it has one, from the target's law. Every block that can be reached.
        total_weight: sum of the weights of all branches, 1 unless the code draws no outcome.
        num_paths: branches that were run.
        mean_emitted: expected tokens that leave a block.
    """

    total_variation: float
    conditional: dict[tuple[Tokens, Tokens], float] = field(repr=False)
    total_weight: float
    num_paths: int
    mean_emitted: float

    @property
    def worst(self) -> float:
        """Largest deviation of all: total variation, conditional ones, total weight from 1."""
        return max(self.total_variation, *self.conditional.values(), abs(self.total_weight - 1))


def enumerate_law(
    draft: Draft,
    verify: Verify,
    target_law: TargetLaw,
    num_blocks: int = 2,
    *,
    num_draft: int,
    start: Tokens = (0,),
    order: int | None = None,
) -> Law:
    """Law of the tokens that leave `num_blocks` blocks after the committed tokens `start`.

    Args:
        draft: context and noise to a proposal of `num_draft` slots. The context are the committed
            tokens, its last one the anchor.
        verify: context, proposal and noise to what is accepted, by target laws of its own.
        target_law: context to p of the next token: the judge.
        order: all three depend on the last `order` tokens of a context only, and get no more, so
            that equal contexts are enumerated once (None: on all of it).

    Raises:
        LabError: as `enumerate_block`.
    """

    def cut(context: Tokens) -> Tokens:
        return context if order is None else context[-order:]

    blocks = cache(lambda context: enumerate_block(draft, verify, context, num_draft))
    judge = cache(lambda context: np.asarray(target_law(context), dtype=np.float64))
    emitted: dict[Tokens, float] = {(): 1.0}
    visited: set[Tokens] = set()
    for _ in range(num_blocks):
        later: Counter[Tokens] = Counter()
        for tokens, weight in emitted.items():
            context = cut(start + tokens)
            visited.add(context)
            for more, share in blocks(context).law.items():
                later[tokens + more] += weight * share
        emitted = dict(later)
    conditional = {}
    for context in visited:
        conditional |= _conditional(blocks(context).law, context, lambda c: judge(cut(c)))
    return Law(
        total_variation=_total_variation(
            emitted, lambda tokens: judge(cut(start + tokens)), num_blocks * (num_draft + 1)
        ),
        conditional=conditional,
        total_weight=sum(emitted.values()),
        num_paths=sum(blocks(context).num_paths for context in visited),
        mean_emitted=sum(len(tokens) * weight for tokens, weight in emitted.items()) / num_blocks,
    )


def _conditional(
    law: dict[Tokens, float], context: Tokens, judge: Callable[[Tokens], np.ndarray]
) -> dict[tuple[Tokens, Tokens], float]:
    """Per prefix of a block's tokens, the total variation of the next one's law from p."""
    after: dict[Tokens, Counter[int]] = {}
    for tokens, weight in law.items():
        for place, token in enumerate(tokens):
            after.setdefault(tokens[:place], Counter())[token] += weight
    found = {}
    for prefix, weights in after.items():
        p = judge(context + prefix)
        given = np.bincount([*weights], weights=[*weights.values()], minlength=len(p))
        found[context, prefix] = float(np.abs(given / given.sum() - p).sum() / 2)
    return found


def _total_variation(
    emitted: dict[Tokens, float], judge: Callable[[Tokens], np.ndarray], length: int
) -> float:
    """Between the emitted tokens, extended by p to `length`, and p alone."""
    vocab = len(judge(()))
    extended, target = np.zeros(()), np.ones(())
    for size in range(length):
        prefixes = itertools.product(range(vocab), repeat=size)
        p = np.array([judge(prefix) for prefix in prefixes]).reshape((vocab,) * (size + 1))
        extended, target = extended[..., None] * p, target[..., None] * p
        for tokens, weight in emitted.items():
            if len(tokens) == size + 1:
                extended[tokens] += weight
    return float(np.abs(extended - target).sum() / 2)


class float64(TorchFunctionMode):  # noqa: N801 - used like torch.no_grad
    """Within it `tensor.float()`, by which the lab's code asks for float32, gives float64."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*args, **(kwargs or {}))
