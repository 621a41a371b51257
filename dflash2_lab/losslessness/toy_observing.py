"""What the battery is given of a decode of the toy: scores of tokens, drafts and verifier's log.

Every law is looked up afresh from the emitted tokens; of the decoder only its output, the q it
reported and the number of drafts it kept are used.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from dflash2_lab.losslessness.battery import Drafted, Emitted
from dflash2_lab.losslessness.scoring import residual_pit, score
from dflash2_lab.losslessness.toy import Toy
from dflash2_lab.losslessness.toy_decoding import Decoded, Verification
from dflash2_lab.losslessness.toy_noise import taken

_TOKENS_PER_DRAFT = 4  # 4,096 emitted tokens come with 1,024 drafts


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
    history = np.concatenate([np.stack([decoded.start // V, decoded.start % V], 1), tokens], axis=1)
    return Streams(tokens, history[:, :-2] * V + history[:, 1:-1], block, slot)


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


def observe_drafts(toy: Toy, decoded: Decoded, num_tokens: int) -> Drafted | None:
    """Drafts of the first blocks of all rows, a fixed number of them: num_tokens / 4 drafts a run.

    None where that is not a block of each row.
    """
    V, P, N = toy.config.vocab, toy.config.num_draft, len(decoded.start)
    T = num_tokens * decoded.num_runs // (N * P * _TOKENS_PER_DRAFT)
    if T == 0:
        return None
    # Every block emits at least one token and at most P + 1 <= 4 P, so that T blocks are there.
    path, ids, law, num = (
        part[:T] for part in (decoded.path, decoded.ids, decoded.law, decoded.num)
    )
    path, ids, law, num = path.reshape(T * N, P), _flat(ids), _flat(law), num.ravel()
    contexts = _path_contexts(toy, decoded, T)
    v = Verification(toy.p, contexts, path, ids, law)
    q = _dense(_flat(ids), _flat(law), V)
    drafts = score(*_tensors(path.ravel(), q))
    given = v.q_drafted()
    chance = np.where(given > 0, v.p_drafted() / np.where(given > 0, given, 1.0), 1.0)
    slots = np.arange(P)
    last = decoded.tokens[:T].reshape(T * N, P + 1)[np.arange(T * N), num]
    full = num == P
    at = np.minimum(num, P - 1)
    refused = _tensors(last[~full], v.p(at)[~full], taken(q.reshape(T * N, P, V), at)[~full])
    # A decoder that drops the bonus has drawn it all the same.
    bonus = score(*_tensors(last[full], v.p(num)[full]))
    below, mass = residual_pit(*refused)
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


def _path_contexts(toy: Toy, decoded: Decoded, T: int) -> Int[np.ndarray, "TN P1"]:
    """Context of each drafted slot, and after the last, of the first T blocks."""
    V, (_, N) = toy.config.vocab, decoded.num.shape
    context, rows, found = decoded.start, np.arange(N), []
    for tokens, emitted, path in zip(
        decoded.tokens[:T], decoded.emitted[:T], decoded.path[:T], strict=True
    ):
        before = np.stack([context // V, context % V], axis=1)
        found.append(_contexts(np.concatenate([before, path], axis=1), V))
        history = np.concatenate([before, tokens], axis=1)
        context = history[rows, emitted] * V + history[rows, emitted + 1]
    return np.concatenate(found)


def _contexts(history: Int[np.ndarray, "N L2"], vocab: int) -> Int[np.ndarray, "N L1"]:
    return history[:, :-1] * vocab + history[:, 1:]


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[2:])


def _dense(
    ids: Int[np.ndarray, "n M"], law: Float[np.ndarray, "n M"], vocab: int
) -> Float[np.ndarray, "n V"]:
    """Laws over the vocabulary; a reported q that rounding left without sum 1 is normalised."""
    dense = np.zeros((len(ids), vocab))
    np.put_along_axis(dense, ids, law, axis=-1)
    return dense / dense.sum(-1, keepdims=True)


def _tensors(*arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)
