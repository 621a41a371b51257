"""The random numbers of the toy's decoder, one stream of them for each role.

A decoder asks for a draw from a law or a test of a probability and never sees a number, so that
another source of choices (an enumeration of all branches) can take the place of this one. The
faults that use one number in two roles are subclasses.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int


def inverse_cdf(
    law: Float[np.ndarray, "N M"], uniform: Float[np.ndarray, " N"]
) -> Int[np.ndarray, " N"]:
    """The first entry whose cumulated mass exceeds uniform * (mass of the row)."""
    mass = law.cumsum(-1)
    below = mass <= uniform[:, None] * mass[:, -1:]
    return np.minimum(below.sum(-1), law.shape[-1] - 1)


def taken(ids: Int[np.ndarray, "N M"], index: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """ids[n, index[n]] of every row."""
    return ids[np.arange(len(ids)), index]


class Noise:
    """Independent uniform numbers for drafts, acceptance tests and the final draw of each block."""

    def __init__(self, seed: int | Sequence[int], num_rows: int, num_draft: int, vocab: int):
        self.shape, self.vocab = (num_rows, num_draft), vocab
        sequences = np.random.SeedSequence(seed).spawn(3)
        self.of_draft, self.of_test, self.of_final = (
            np.random.Generator(np.random.Philox(sequence)) for sequence in sequences
        )

    def next_block(self) -> None:
        """Fresh numbers for every row."""
        self.draft = self.of_draft.random(self.shape)
        self.accept = self.of_test.random(self.shape)
        self.last = self.of_final.random(self.shape[0])

    def draw_draft(
        self, slot: int, ids: Int[np.ndarray, "N M"], law: Float[np.ndarray, "N M"]
    ) -> Int[np.ndarray, " N"]:
        """A drafted token of every row."""
        return taken(ids, inverse_cdf(law, self.draft[:, slot]))

    def test(self, probability: Float[np.ndarray, "N P"]) -> Bool[np.ndarray, "N P"]:
        """The acceptance test of every slot."""
        return self.accept < probability

    def draw_target(self, slot: int, law: Float[np.ndarray, "N V"]) -> Int[np.ndarray, " N"]:
        """A token of the target in the place of a slot's test (token matching)."""
        return inverse_cdf(law, self.accept[:, slot])

    def draw_final(
        self, num: Int[np.ndarray, " N"], law: Float[np.ndarray, "N V"]
    ) -> Int[np.ndarray, " N"]:
        """The residual token of rows refused at slot `num`, the bonus of the others."""
        return inverse_cdf(law, self.last)


class ReseededNoise(Noise):
    """Every block gets the numbers of the first."""

    def next_block(self) -> None:
        if not hasattr(self, "draft"):
            super().next_block()


class DraftInTestNoise(Noise):
    """The uniform number that picked a draft also tests it."""

    def next_block(self) -> None:
        super().next_block()
        self.accept = self.draft


class TestInResidualNoise(Noise):
    """The uniform number that refused a draft also picks its replacement."""

    def draw_final(self, num, law):
        full = num == self.shape[1]
        at_refusal = taken(self.accept, np.minimum(num, self.shape[1] - 1))
        return inverse_cdf(law, np.where(full, self.last, at_refusal))


class SharedGumbelNoise(Noise):
    """The Gumbel noise, over the vocabulary, that picked a draft also picks its replacement."""

    def next_block(self) -> None:
        super().next_block()
        self.gumbel = -np.log(-np.log(self.of_draft.random((*self.shape, self.vocab))))

    def draw_draft(self, slot, ids, law):
        noise = np.take_along_axis(self.gumbel[:, slot], ids, axis=-1)
        return taken(ids, _perturbed_argmax(law, noise))

    def draw_final(self, num, law):
        slot = np.minimum(num, self.shape[1] - 1)
        residual = _perturbed_argmax(law, taken(self.gumbel, slot))
        return np.where(num == self.shape[1], inverse_cdf(law, self.last), residual)


def _perturbed_argmax(law, noise):
    logs = np.log(law, where=law > 0, out=np.full(law.shape, -np.inf))
    return (logs + noise).argmax(-1)
