"""What the battery is given of a decode of the toy: scores of tokens, drafts and verifier's log.

Every law is looked up afresh from the emitted tokens; of the decoder only its output, the q it
reported and the number of drafts it kept are used. As in a real decode the number of tokens is
fixed and the log is that of all blocks they came from: of the correct toy 1.6 drafts a token.
"""

from collections.abc import Iterator
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from dflash2_lab.losslessness.battery import Drafted, Emitted
from dflash2_lab.losslessness.scoring import Scores, residual_pit, score
from dflash2_lab.losslessness.toy import Toy
from dflash2_lab.losslessness.toy_decoding import Decoded, Verification
from dflash2_lab.losslessness.toy_noise import taken


class Streams(NamedTuple):
    """Emitted tokens by row (N) and place (L), the context and block of each, and its slot."""

    tokens: Int[np.ndarray, "N L"]
    context: Int[np.ndarray, "N L"]
    block: Int[np.ndarray, "N L"]
    slot: Int[np.ndarray, "N L"]


def streams(toy: Toy, decoded: Decoded, num_tokens: int) -> Streams:
    """The first tokens of every row, `num_tokens` for a run in all."""
    V, N = toy.config.vocab, len(decoded.start)
    length = num_tokens * decoded.num_runs // N
    first = decoded.emitted.cumsum(0) - decoded.emitted
    slots = np.arange(decoded.tokens.shape[-1])
    kept = (slots < decoded.emitted[..., None]) & (first[..., None] + slots < length)
    row, block, slot = (part.reshape(N, length) for part in kept.transpose(1, 0, 2).nonzero())
    tokens = decoded.tokens[block, row, slot]
    return Streams(tokens, _contexts(decoded.start, tokens, V)[:, :-1], block, slot)


def observe_tokens(toy: Toy, decoded: Decoded, num_tokens: int) -> Emitted:
    """Emitted tokens of all runs with their scores; `stream` is the row."""
    found = streams(toy, decoded, num_tokens)
    N, length = found.tokens.shape
    row = np.repeat(np.arange(N), length)
    tokens, context, block, slot = (part.ravel() for part in found)
    p = toy.p[context]
    drafted = slot < toy.config.num_draft
    q = p.copy()  # the bonus has no proposal
    at = block[drafted], row[drafted], slot[drafted]
    q[drafted] = _dense(decoded.ids[at], decoded.law[at], toy.config.vocab)
    order = np.tile(np.arange(length), N)
    return Emitted(score(*_tensors(tokens, p, q)), row, order, slot)


def observe_drafts(toy: Toy, decoded: Decoded, num_tokens: int) -> Drafted:
    """The log of the blocks that the first tokens of every row came from, `num_tokens` a run."""
    V, P = toy.config.vocab, toy.config.num_draft
    row, block, first = _blocks(decoded, num_tokens)
    tokens, path, ids, law, num = (
        part[block, row]
        for part in (decoded.tokens, decoded.path, decoded.ids, decoded.law, decoded.num)
    )
    contexts = _contexts(streams(toy, decoded, num_tokens).context[row, first], path, V)
    v = Verification(toy.p, contexts, path, ids, law)
    # Of q the candidates alone: a rank is a rank among them.
    place = (ids == path[..., None]).argmax(-1)
    drafts = score(*_tensors(place.ravel(), _law(_flat(law))))
    given = v.q_drafted()
    chance = np.where(given > 0, v.p_drafted() / np.where(given > 0, given, 1.0), 1.0)
    slots = np.arange(P)
    last = taken(tokens, num)
    full, at = num == P, np.minimum(num, P - 1)
    refused = tuple(taken(part, at)[~full] for part in (contexts, ids, law))
    left = _tensors(last[~full], toy.p[refused[0]], _dense(*refused[1:], V))
    # A decoder that drops the bonus has drawn it all the same.
    bonus = score(*_tensors(last[full], toy.p[contexts[full, P]]))
    below, mass = residual_pit(*left)
    return Drafted(
        heat_score=drafts.heat_score,
        heat_variance=drafts.heat_variance,
        below=drafts.below,
        mass=drafts.mass,
        reached=(slots <= num[:, None]).ravel(),
        accepted=(slots < num[:, None]).ravel(),
        accept_probability=np.minimum(chance, 1.0).ravel(),
        residual_below=below,
        residual_mass=mass,
        bonus_below=bonus.below,
        bonus_mass=bonus.mass,
        heat_third=drafts.heat_third,
    )


def observe_runs(toy: Toy, decoded: Decoded, num_tokens: int) -> Iterator[tuple[Emitted, Drafted]]:
    """What `observe_tokens` and `observe_drafts` make of each run, scored side by side."""
    emitted, drafted = (of(toy, decoded, num_tokens) for of in (observe_tokens, observe_drafts))
    row, block, _ = _blocks(decoded, num_tokens)
    run = row * decoded.num_runs // len(decoded.start)
    full = decoded.num[block, row] == toy.config.num_draft
    place = {"residual": run[~full], "bonus": run[full]}
    drafts = run.repeat(toy.config.num_draft)
    of_column = [place.get(name.split("_")[0], drafts) for name in drafted._fields]
    of_token = emitted.stream * decoded.num_runs // len(decoded.start)
    for index in range(decoded.num_runs):
        yield (
            Emitted(
                Scores(*(_of_run(part, of_token, index) for part in emitted.scores)),
                *(_of_run(part, of_token, index) for part in emitted[1:]),
            ),
            Drafted(*(map(_of_run, drafted, of_column, repeat(index)))),
        )


def _of_run(
    part: Float[np.ndarray, "n *rest"], run: Int[np.ndarray, " n"], index: int
) -> Float[np.ndarray, "m *rest"]:
    """The rows of one run; rows are in the order of runs."""
    return part[slice(*np.searchsorted(run, [index, index + 1]))]


def _blocks(decoded: Decoded, num_tokens: int) -> tuple[Int[np.ndarray, " n"], ...]:
    """Row, block, and place of its first token, of all blocks that the tokens came from."""
    first = decoded.emitted.cumsum(0) - decoded.emitted
    row, block = (first < num_tokens * decoded.num_runs // len(decoded.start)).T.nonzero()
    return row, block, first[block, row]


def _contexts(
    start: Int[np.ndarray, " N"], tokens: Int[np.ndarray, "N L"], vocab: int
) -> Int[np.ndarray, "N L1"]:
    """The context of each token after those, and after the last."""
    history = np.concatenate([np.stack([start // vocab, start % vocab], 1), tokens], axis=1)
    return history[:, :-1] * vocab + history[:, 1:]


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])


def _dense(
    ids: Int[np.ndarray, "n M"], law: Float[np.ndarray, "n M"], vocab: int
) -> Float[np.ndarray, "n V"]:
    """Laws over the vocabulary."""
    dense = np.zeros((len(ids), vocab))
    np.put_along_axis(dense, ids, _law(law), axis=-1)
    return dense


def _law(law: Float[np.ndarray, "n M"]) -> Float[np.ndarray, "n M"]:
    """A reported q that rounding left without sum 1 is normalised."""
    return law / law.sum(-1, keepdims=True)


def _tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
