"""One draft-verify-accept cycle of a whole batch on static memory, without a look from the host.

    draft    [anchor, mask, ...] through the drafter, against the context keys of its cache
    propose  the policy's path and its q
    verify   [anchor, path] through the target, which extends its own cache
    accept   longest accepted prefix and the token after it, from p and q
    commit   emit, and put the target's features of the block into the drafter's cache

A block's rows beyond the accepted ones leave stale entries in both caches, at positions that the
next block overwrites before anything reads them.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dflash2_lab.decoding.lean import (
    Scratch,
    Trunk,
    lean_drafter,
    lean_target,
    make_scratch,
    run_layers,
)
from dflash2_lab.kernels.block_verify import block_verify
from dflash2_lab.kernels.candidate_selector import select
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.kernels.commit import Progress, commit, make_progress
from dflash2_lab.kernels.context_store import store_context
from dflash2_lab.kernels.draw import draw
from dflash2_lab.kernels.linear import linear
from dflash2_lab.kernels.row_law import Law, row_law
from dflash2_lab.kernels.stream import Norm, Rows, embed_block, start_stream
from dflash2_lab.kernels.verify import CandidateLaw, FullLaw, verify
from dflash2_lab.models.drafter import DFlash2Drafter, Drafter, DSparkDrafter
from dflash2_lab.models.layers import softcap
from dflash2_lab.target import Target

NUM_STOPS = 16  # stop tokens a request may have


@dataclass(frozen=True, eq=False)
class Laws:
    """Per sequence: how it samples, and its keys of random numbers; `forced` (-1: not) is the
    number of drafts that count as accepted, for timing. The first three also per verified row."""

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    row_temperature: Float[Tensor, " BG"]
    row_top_k: Int[Tensor, " BG"]
    row_top_p: Float[Tensor, " BG"]
    draft_key: Int[Tensor, " B"]
    accept_key: Int[Tensor, " B"]
    final_key: Int[Tensor, " B"]
    forced: Int[Tensor, " B"]


@dataclass(frozen=True, eq=False)
class Side:
    """A trunk with its cache [L, B, KV, S, D], embedding and output head."""

    trunk: Trunk
    keys: Float[Tensor, "L B KV S D"]
    values: Float[Tensor, "L B KV S D"]
    scratch: Scratch
    embedding: Float[Tensor, "V H"]
    head: Float[Tensor, "V H"]
    head_bias: Float[Tensor, " V"] | None


def _side(
    trunk: Trunk,
    batch: int,
    rows: int,
    capacity: int,
    embedding: Tensor,
    head: torch.nn.Linear,
) -> Side:
    shape = (len(trunk.layers), batch, trunk.num_kv_heads, capacity, trunk.head_dim)
    keys, values = (torch.zeros(shape, dtype=embedding.dtype, device=embedding.device)
                    for _ in range(2))  # fmt: skip
    scratch = make_scratch(trunk, batch, rows, capacity)
    return Side(trunk, keys, values, scratch, embedding, head.weight, head.bias)


def _make_laws(batch: int, rows: int, device: torch.device) -> Laws:
    def full(value: float, dtype: torch.dtype, size: int = batch) -> Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def sampling(size: int) -> tuple[Tensor, Tensor, Tensor]:
        return (full(0, torch.float32, size), full(0, torch.int32, size),
                full(1, torch.float32, size))  # fmt: skip

    keys = (full(0, torch.int64) for _ in range(3))
    return Laws(*sampling(batch), *sampling(batch * rows), *keys, full(-1, torch.int32))


class Cycle:
    """Static memory of a batch and the cycle over it.

    `num_draft` slots of the drafter's block are verified; 0 without a drafter, when a cycle is one
    token of plain decoding. `capacity` counts cache positions, a whole block beyond the last token
    included. `acceptance` is the rule, "token" (`verify`) or "block" (`block_verify`).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        policy: str | None,
        num_draft: int,
        batch: int,
        capacity: int,
        max_tokens: int,
        acceptance: str = "token",
    ):
        self.target, self.drafter, self.policy, self.num_draft = target, drafter, policy, num_draft
        self.acceptance = acceptance
        device = target.device
        self.progress: Progress = make_progress(batch, max_tokens, NUM_STOPS, device)

        self.rows = num_draft + 1
        self.laws = _make_laws(batch, self.rows, device)
        self.large = _side(lean_target(target, capacity), batch, self.rows, capacity,
                           target.embed_weight, target.head)  # fmt: skip
        rows = batch * max(self.rows, drafter.settings.block_size if drafter else 1)
        self.arrivals = torch.zeros(rows, dtype=torch.int32, device=device)
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self.none_accepted = torch.zeros(batch, dtype=torch.int64, device=device)
        self.no_draft = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        if drafter is not None:
            self._add_drafter(drafter, batch, capacity)

    def _add_drafter(self, drafter: Drafter, batch: int, capacity: int) -> None:
        settings, target = drafter.settings, self.target
        if isinstance(drafter, DFlash2Drafter) and drafter.candidate_selector.projected:
            tables = drafter.candidate_selector.tables(target.embed_weight)
            self.codebooks = tables["predecessor_codebook"], tables["successor_codebook"]
        elif isinstance(drafter, DFlash2Drafter):
            selector = drafter.candidate_selector
            self.codebooks = selector.predecessor_codebook, selector.successor_codebook
        embedding = drafter.input_embedding(target.embed_weight)
        self.small = _side(lean_drafter(drafter, capacity), batch, settings.block_size, capacity,
                           embedding, drafter.lm_head or target.head)  # fmt: skip
        masks = (batch, settings.block_size - 1)
        self.masks = torch.full(masks, settings.mask_token_id, device=target.device)
        width = target.hidden_size
        ids = settings.target_layer_ids
        shape = (batch * self.rows, len(ids) * width)
        self.features = torch.empty(shape, dtype=target.dtype, device=target.device)
        parts = self.features.split(width, dim=1)
        self.taps: Mapping[int, Tensor] = dict(zip(ids, parts, strict=True))
        attention = [layer.self_attn for layer in drafter.layers]
        self.context_weight, self.context_bias = _stacked(attention)
        self.context_norm = Norm(drafter.hidden_norm.weight, settings.rms_norm_eps)
        self.key_norms = torch.stack([part.k_norm.weight for part in attention])

    @torch.inference_mode()
    def step(self) -> None:
        """One cycle of every sequence; the ended ones stand still."""
        draft, q = self._propose() if self.drafter is not None else (self.no_draft, None)
        logits = self.verify_pass(draft)
        if self.drafter is None:
            law, accepted, following = self._sample(logits)
        else:
            # Acceptance waits for latency, the new keys for memory: they run side by side.
            with self._beside():
                self.extend_context()
            law, accepted, following = self._accept(logits, draft, q)
            self._join()
        slots = 0 if self.drafter is None else self.drafter.settings.num_draft
        finite = law.finite.view(-1, self.rows)
        commit(self.progress, draft, accepted, following, finite, slots)

    def _sample(self, logits: Float[Tensor, "B V"]) -> tuple[Law, Tensor, Tensor]:
        laws, progress = self.laws, self.progress
        law = row_law(logits, laws.temperature, laws.top_k, laws.top_p, arrivals=self.arrivals)
        following = draw(
            logits, law, laws.temperature, laws.final_key, progress.final_counter,
            arrivals=self.arrivals,
        )  # fmt: skip
        return law, self.none_accepted, following

    def _accept(
        self,
        logits: Float[Tensor, "BG V"],
        draft: Int[Tensor, "B P"],
        q: CandidateLaw | FullLaw | None,
    ) -> tuple[Law, Int[Tensor, " B"], Int[Tensor, " B"]]:
        laws, progress = self.laws, self.progress
        law = row_law(
            logits, laws.row_temperature, laws.row_top_k, laws.row_top_p, arrivals=self.arrivals
        )
        rule = block_verify if self.acceptance == "block" else verify
        accepted, following = rule(
            logits.unflatten(0, (-1, self.rows)), law, draft, q, laws.temperature,
            laws.accept_key, progress.draft_counter, laws.final_key, progress.final_counter,
            progress.offered, laws.forced, arrivals=self.arrivals,
        )  # fmt: skip
        return law, accepted, following

    def _beside(self) -> AbstractContextManager:
        """Where work runs beside what follows, until `_join`: a stream of its own on a GPU."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.side)

    def _join(self) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)

    def verify_pass(self, draft: Int[Tensor, "B P"]) -> Float[Tensor, "BG V"]:
        """Target logits of [anchor, path]; its features go to `features`."""
        if self.drafter is None:
            return self.target_logits(self.target_rows(draft, None))
        rows = self.target_rows(draft, self.taps)
        with self._beside():
            self._fuse_features()
        return self.target_logits(rows)

    def target_rows(self, draft: Int[Tensor, "B P"], taps: Mapping[int, Tensor] | None) -> Rows:
        """The block [anchor, path] through the target's layers and its cache."""
        side, norm = self.large, self.large.trunk.layers[0].input_norm
        stream = embed_block(side.embedding, self.progress.anchor, draft, 1.0, norm)
        return run_layers(side.trunk, stream, side.keys, side.values, self.progress.start, True,
                          side.scratch, taps)  # fmt: skip

    def target_logits(self, rows: Rows) -> Float[Tensor, "BG V"]:
        """The target's output head."""
        return linear(rows, self.large.head, self.large.head_bias)

    def _fuse_features(self) -> None:
        """The context's hidden states. They are ready before the head and take as long as it does
        to read, so the launches in between cost nothing here."""
        features = self.features.to(self.drafter.dtype)
        scratch = self.small.scratch.product
        fused = linear(Rows(features), self.drafter.fc.weight, workspace=scratch)
        self.context = start_stream(fused, self.context_norm).normed

    def extend_context(self) -> None:
        """Keys and values of the verified block, behind the context in the drafter's cache."""
        self._join()
        side, batch = self.small, len(self.progress.start)
        new = linear(self.context, self.context_weight, self.context_bias)
        store_context(
            new.unflatten(0, (batch, self.rows)), self.key_norms, self.context_norm.eps, side.keys,
            side.values, self.progress.start, side.trunk.cos, side.trunk.sin,
        )  # fmt: skip

    def draft_pass(self) -> tuple[Rows, Float[Tensor, "BG V"]]:
        """Input of the output head and unary draft logits of every block row."""
        side, settings = self.small, self.drafter.settings
        norm = side.trunk.layers[0].input_norm
        scale = settings.input_embedding_scale
        stream = embed_block(side.embedding, self.progress.anchor, self.masks, scale, norm)
        rows = run_layers(side.trunk, stream, side.keys, side.values, self.progress.start, False,
                          side.scratch)  # fmt: skip
        logits = linear(rows, side.head, side.head_bias)
        if settings.output_multiplier != 1.0:
            logits = logits * settings.output_multiplier
        capped = softcap(logits, settings.final_logit_softcapping)
        return rows, self.drafter.to_target_vocab(capped)

    def _propose(self) -> tuple[Int[Tensor, "B P"], CandidateLaw | FullLaw | None]:
        """The policy's path through the block's slots, cut to the verified ones, and its q."""
        rows, logits = self.draft_pass()
        if self.policy.startswith("selector"):
            return self._selector(rows, logits)
        if self.policy.startswith("markov"):
            return self._markov(logits)
        if self.policy == "sampled":
            return self._sampled(logits)
        return self._slots(candidate_topk(logits, 1)[1][:, 0])[:, : self.num_draft], None

    def _slots(self, rows: Tensor) -> Tensor:
        """[B block_size, ...] to the slots [B, num_slots, ...] among them."""
        settings = self.drafter.settings
        blocks = rows.unflatten(0, (-1, settings.block_size))
        return blocks if settings.sample_from_anchor else blocks[:, 1:]

    def _selector(self, rows: Rows, logits: Tensor) -> tuple[Tensor, CandidateLaw | None]:
        laws = self.laws
        unary, ids, gate = self.candidates(rows, logits)
        greedy = self.policy == "selector_greedy"
        temperature = torch.zeros_like(laws.temperature) if greedy else laws.temperature
        tokens, law = select(
            unary, ids, self.progress.anchor, gate, *self.codebooks, temperature,
            laws.draft_key, self.progress.draft_counter, arrivals=self.arrivals,
        )  # fmt: skip
        window = slice(None), slice(self.num_draft)
        if greedy:
            return tokens[window], None
        return tokens[window], CandidateLaw(ids[window].contiguous(), law[window].contiguous())

    def candidates(
        self, rows: Rows, logits: Float[Tensor, "BG V"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Unary scores and ids of the best candidates of every slot, and the selector's gate."""
        selector = self.drafter.candidate_selector
        with self._beside():
            gate = linear(rows, selector.hidden_projection.weight)
        unary, ids = (
            self._slots(part).contiguous() for part in candidate_topk(logits, selector.top_k)
        )
        self._join()
        return unary, ids, self._slots(gate)

    def _sampled(self, logits: Tensor) -> tuple[Tensor, FullLaw]:
        """Each verified slot alone from the request's law."""
        laws, window = self.laws, self.num_draft
        logits = self._slots(logits)[:, :window]
        parts = (laws.temperature, laws.top_k, laws.top_p, laws.draft_key)
        *law, keys = (part.repeat_interleave(window) for part in parts)
        offset = torch.arange(window, device=logits.device)
        counters = (self.progress.draft_counter[:, None] + offset).flatten()
        rows = logits.flatten(0, 1)
        found = row_law(rows, *law, arrivals=self.arrivals)
        tokens = draw(rows, found, law[0], keys, counters, arrivals=self.arrivals)
        return tokens.unflatten(0, (-1, window)), FullLaw(logits, found)

    def _markov(self, logits: Tensor) -> tuple[Tensor, FullLaw | None]:
        """Left to right over the vocabulary; a slot's correction needs the token before it."""
        laws, drafter, progress = self.laws, self.drafter, self.progress
        logits = self._slots(logits)[:, : self.num_draft].float()
        previous, tokens, found = progress.anchor, [], []
        greedy = self.policy == "markov_greedy"
        temperature = torch.zeros_like(laws.temperature) if greedy else laws.temperature
        for slot in range(self.num_draft):
            row = logits[:, slot]
            if isinstance(drafter, DSparkDrafter) and drafter.markov_head is not None:
                row += drafter.to_target_vocab(drafter.markov_head(previous)).float()
            law = row_law(row, temperature, arrivals=self.arrivals)
            counter = progress.draft_counter + slot
            previous = draw(row, law, temperature, laws.draft_key, counter, arrivals=self.arrivals)
            tokens.append(previous)
            found.append(law)
        path = torch.stack(tokens, 1)
        if greedy:
            return path, None
        parts = (torch.stack(part, 1).flatten() for part in zip(*found, strict=True))
        return path, FullLaw(logits, Law(*parts))


def _stacked(attention: list[torch.nn.Module]) -> tuple[Tensor, Tensor | None]:
    """Key and value projections of all layers in the order of `store_context`."""
    pairs = [(part.k_proj, part.v_proj) for part in attention]
    weight = torch.cat([module.weight.detach() for pair in pairs for module in pair])
    if pairs[0][0].bias is None:
        return weight, None
    return weight, torch.cat([module.bias.detach() for pair in pairs for module in pair])
