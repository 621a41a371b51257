"""Random laws, tokens drawn from them and their scores, for the losslessness tests."""

import numpy as np
import torch

from dflash2_lab.losslessness.battery import Emitted
from dflash2_lab.losslessness.scoring import score

VOCAB, STREAMS, SLOTS = 12, 8, 5


def random_laws(rng, num, vocab=VOCAB):
    """Dirichlet laws of many concentrations with zeros: a law of its own for every token."""
    weights = rng.gamma(rng.uniform(0.3, 1.5, (num, 1)), size=(num, vocab))
    weights[rng.random((num, vocab)) < 0.3] = 0.0
    weights[:, 0] += 1e-3
    return weights / weights.sum(axis=1, keepdims=True)


def proposals(rng, p):
    """Laws q that share much with p, and not their zeros."""
    q = 0.6 * p + 0.4 * random_laws(rng, *p.shape)
    q[rng.random(p.shape) < 0.2] = 0.0
    q += 1e-9 * (q.sum(axis=1, keepdims=True) == 0)
    return q / q.sum(axis=1, keepdims=True)


def draw(law, uniform):
    """Inverse cdf; never a token of mass 0."""
    edges = law.cumsum(axis=1)
    return (uniform[:, None] * edges[:, -1:] >= edges).sum(axis=1)


def scored(tokens, p, q=None):
    laws = (None if law is None else torch.from_numpy(law) for law in (p, q))
    return score(torch.from_numpy(tokens), *laws)


def emitted(tokens, p, q=None, streams=STREAMS):
    """Tokens of `streams` requests in turn, in blocks of `SLOTS`."""
    place = np.arange(len(tokens))
    order = place // streams
    return Emitted(scored(tokens, p, q), place % streams, order, order % SLOTS)


def tempered(p, power):
    hot = np.where(p > 0, p, 0.0) ** power * (p > 0)
    return hot / hot.sum(axis=1, keepdims=True)


def parts(whole, size):
    """Cut a named tuple of arrays into runs of `size` rows."""
    num = len(whole.stream) // size
    for run in range(num):
        rows = slice(run * size, (run + 1) * size)
        scores = type(whole.scores)(*(None if x is None else x[rows] for x in whole.scores))
        yield Emitted(scores, *(x[rows] for x in whole[1:]))


def pull_to_drafter(p, q):
    return 0.8 * p + 0.2 * q * (p > 0) / (q * (p > 0)).sum(axis=1, keepdims=True).clip(1e-12)
