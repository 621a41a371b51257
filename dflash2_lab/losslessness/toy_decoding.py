"""Speculative decoding of many rows of the toy side by side, with one hook for each stage.

`Rules` holds the hooks; their defaults are a correct decoder with token-level acceptance (Leviathan
et al. 2023). A fault replaces a hook, see `faults`. N rows, P drafted slots, M entries of q, V
tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.toy import Toy, candidate_scores, mix_target, softmax
from dflash2_lab.losslessness.toy_noise import Noise, taken


class State(NamedTuple):
    """What a row carries from block to block: its context, and the draft refused last (-1: none)"""

    context: Int[np.ndarray, " N"]
    refused: Int[np.ndarray, " N"]


class Walk(NamedTuple):
    """One slot of the drafter's walk. `before` is the token before the slot, `astray` the token
    before that at the first slot and `before` at the others; `path` the context on the path."""

    toy: Toy
    slot: int
    features: Int[np.ndarray, " N"]
    before: Int[np.ndarray, " N"]
    astray: Int[np.ndarray, " N"]
    path: Int[np.ndarray, " N"]

    @property
    def ids(self) -> Int[np.ndarray, "N K"]:
        """The candidates."""
        return self.toy.ids[self.slot][self.features]

    def scores(self, before: Int[np.ndarray, " N"] | None = None) -> Float[np.ndarray, "N K"]:
        """Scores of the candidates after a token; None: the one before the slot."""
        before = self.before if before is None else before
        return candidate_scores(self.toy, self.slot, self.features, before)[2]

    def unary(self) -> Float[np.ndarray, "N K"]:
        """Scores of the candidates without the pairwise term."""
        return candidate_scores(self.toy, self.slot, self.features, self.before)[1]

    def law(self, scores: Float[np.ndarray, "N K"], temperature: float | None = None):
        """softmax(scores / T), [N, K]; None: the request's T."""
        return softmax(scores / (temperature or self.toy.config.temperature))


class Verification(NamedTuple):
    """What a verifier holds after its target pass: the laws `table[contexts]` at the P slots and
    after them, the drafts, and the q that was reported for each over `ids`."""

    table: Float[np.ndarray, "W V"]
    contexts: Int[np.ndarray, "N P1"]
    path: Int[np.ndarray, "N P"]
    ids: Int[np.ndarray, "N P M"]
    law: Float[np.ndarray, "N P M"]

    @property
    def num_draft(self) -> int:
        """P."""
        return self.path.shape[1]

    def p(self, index: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N V"]:
        """p of a row's index-th slot; P is the place of the bonus."""
        return self.table[taken(self.contexts, index)]

    def q(self, index: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N V"]:
        """q of a row's index-th slot over the vocabulary."""
        dense = np.zeros((len(self.path), self.table.shape[1]))
        np.put_along_axis(dense, taken(self.ids, index), taken(self.law, index), axis=-1)
        return dense

    def p_drafted(self) -> Float[np.ndarray, "N P"]:
        """p of the drafts."""
        return self.table[self.contexts[:, :-1], self.path]

    def q_drafted(self) -> Float[np.ndarray, "N P"]:
        """q of the drafts."""
        return (self.law * (self.ids == self.path[..., None])).sum(-1)

    def is_top(self):
        """Whether a draft is the target's best token, [N, P]."""
        return self.table.argmax(-1)[self.contexts[:, :-1]] == self.path


def drawn_law(walk: Walk) -> Float[np.ndarray, "N K"]:
    """q as the walk draws from it."""
    return walk.law(walk.scores())


def target_contexts(toy: Toy, contexts: Int[np.ndarray, "N P1"], state: State):
    """The target pass: the table of laws and the context of each row of it."""
    return toy.p, contexts


def acceptance(v: Verification) -> Float[np.ndarray, "N P"]:
    """p / q of the drafts; a uniform number below it accepts."""
    return v.p_drafted() / v.q_drafted()


def leading(flags) -> Int[np.ndarray, " N"]:
    """How many drafts come before the first refusal."""
    return np.logical_and.accumulate(flags, axis=1).sum(1)


def residual(v: Verification, slot: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N V"]:
    """(p - q)+ where the first draft was refused, not normalised."""
    return np.maximum(v.p(slot) - v.q(slot), 0.0)


def bonus(v: Verification) -> Float[np.ndarray, "N V"]:
    """p after a block of which every draft was accepted."""
    return v.p(np.full(len(v.path), v.num_draft))


def token_rule(rules: "Rules", v: Verification, noise: Noise):
    """Token-level acceptance: drafts accepted [N], and the law of the token after them [N, V]."""
    num = rules.count(noise.test(rules.acceptance(v)))
    slot = np.minimum(num, v.num_draft - 1)
    left = rules.residual(v, slot)
    total = left.sum(-1, keepdims=True)
    left = np.where(total > 0, left / np.where(total > 0, total, 1.0), v.p(slot))
    return num, np.where((num == v.num_draft)[:, None], rules.bonus(v), left)


@dataclass(frozen=True)
class Rules:
    """The hooks of a decoder, in the order in which a block meets them.

    features: (toy, state) -> the context that the drafter's unary scores see.
    drawn: (walk) -> the law on the candidates that the draft is drawn from.
    reported: (walk) -> the law that the verifier is told; None: the one drawn from, itself.
    one_hot: the verifier is told a one-hot law on the draft instead.
    target: (toy, contexts, state) -> the table of laws and the contexts the target pass answers.
    verify: (rules, verification, noise) -> drafts accepted, law of the next token.
    acceptance, count, residual, bonus: the parts of the token-level rule, see `token_rule`.
    keeps_bonus: a block that was accepted in full is followed by its bonus token.
    block_rule: its log is that of block verification, whose tests run from the last slot back.
    offers: drafted slots are handed to the verifier; without it nothing is ever proposed.
    """

    noise: type[Noise] = Noise
    features: Callable = lambda toy, state: state.context
    drawn: Callable = drawn_law
    reported: Callable | None = None
    one_hot: bool = False
    target: Callable = target_contexts
    verify: Callable = token_rule
    acceptance: Callable = acceptance
    count: Callable = leading
    residual: Callable = residual
    bonus: Callable = bonus
    keeps_bonus: bool = True
    block_rule: bool = False
    offers: bool = True


class Decoded(NamedTuple):
    """What came out, by block (T), row (N) and slot (P).

    `start` [N] is the context before the first token; `tokens` [T, N, P + 1] hold the emitted ones,
    `emitted` [T, N] says how many they are; `path`, `ids`, `law` are the drafts and the reported q;
    `num` [T, N] the drafts accepted; `drawn_apart` is the largest difference between a law drawn
    from and the one reported. N rows are `num_runs` runs of as many streams each.
    """

    start: Int[np.ndarray, " N"]
    tokens: Int[np.ndarray, "T N P1"]
    emitted: Int[np.ndarray, "T N"]
    path: Int[np.ndarray, "T N P"]
    ids: Int[np.ndarray, "T N P M"]
    law: Float[np.ndarray, "T N P M"]
    num: Int[np.ndarray, "T N"]
    drawn_apart: float
    num_runs: int

    def run(self, index: int) -> "Decoded":
        """One run, as a decode of its own."""
        width = len(self.start) // self.num_runs
        rows = slice(index * width, (index + 1) * width)
        by_block = (part[:, rows] for part in self[1:7])
        return Decoded(self.start[rows], *by_block, self.drawn_apart, 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per block."""
        return float(self.emitted.mean())


def decode(
    toy: Toy,
    rules: Rules,
    num_tokens: int,
    num_runs: int = 1,
    num_streams: int = 8,
    seed: int | Sequence[int] = 0,
) -> Decoded:
    """Decode `num_tokens` tokens a run, over streams of equal length, from random contexts.

    Raises:
        LabError: tokens that do not divide over the streams, or a decoder that never proposes.
    """
    if num_tokens < num_streams or num_tokens % num_streams:
        raise LabError(f"num_tokens: found {num_tokens}, expected a multiple of {num_streams}")
    V, P, N = toy.config.vocab, toy.config.num_draft, num_runs * num_streams
    starts = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(9,)))
    start = starts.integers(0, V * V, size=N)
    noise = rules.noise(seed, N, P, V)
    state, blocks, lengths, apart = State(start, np.full(N, -1)), [], np.zeros(N, dtype=int), 0.0
    while lengths.min() < num_tokens // num_streams:
        block, state, difference = decode_block(toy, rules, state, noise)
        blocks.append(block)
        lengths += block[1]
        apart = max(apart, difference)
    tokens, emitted, path, ids, law, num = (np.stack(part) for part in zip(*blocks, strict=True))
    return Decoded(start, tokens, emitted, path, ids, law, num, apart, num_runs)


def decode_block(toy: Toy, rules: Rules, state: State, noise: Noise):
    """One block of every row: (tokens, emitted, path, ids, law, num), the next state, and the
    largest difference between drawn and reported q."""
    V, P = toy.config.vocab, toy.config.num_draft
    if P == 0 or not rules.offers:
        raise LabError(f"drafts: found none proposed in {len(state.context)} steps, expected some")
    noise.next_block()
    path, contexts, ids, law, apart = _draft(toy, rules, state, noise)
    table, seen = rules.target(toy, contexts, state)
    v = Verification(table, seen, path, ids, law)
    with np.errstate(divide="ignore", invalid="ignore"):  # a reported q of 0 accepts
        num, final_law = rules.verify(rules, v, noise)
    tokens = np.concatenate([path, path[:, -1:]], axis=1)
    rows = np.arange(len(path))
    tokens[rows, num] = noise.draw_final(num, final_law)
    emitted = num + 1 if rules.keeps_bonus else np.minimum(num + 1, P)
    history = np.stack([state.context // V, state.context % V, *tokens.T], axis=1)
    context = history[rows, emitted] * V + history[rows, emitted + 1]
    refused = np.where(num < P, path[rows, np.minimum(num, P - 1)], -1)
    return (tokens, emitted, path, ids, law, num), State(context, refused), apart


def _draft(toy: Toy, rules: Rules, state: State, noise: Noise):
    """The walk through one block: path, contexts along it, reported q, difference to the drawn."""
    V = toy.config.vocab
    features = rules.features(toy, state)
    before, astray, context = state.context % V, state.context // V, state.context
    path, contexts, all_ids, laws, apart = [], [context], [], [], 0.0
    for slot in range(toy.config.num_draft):
        walk = Walk(toy, slot, features, before, astray, context)
        drawn = rules.drawn(walk)
        ids, law = mix_target(toy, walk.ids, drawn, context)
        token = noise.draw_draft(slot, ids, law)
        if rules.reported is not None:
            _, told = mix_target(toy, walk.ids, rules.reported(walk), context)
            apart, law = max(apart, float(np.abs(told - law).max())), told
        if rules.one_hot:
            law = (ids == token[:, None]).astype(float)
        before = astray = token
        context = context % V * V + token
        for parts, part in ((path, token), (contexts, context), (all_ids, ids), (laws, law)):
            parts.append(part)
    stacked = (np.stack(parts, axis=1) for parts in (path, contexts, all_ids, laws))
    return *stacked, apart
