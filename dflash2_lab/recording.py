"""Record what a drafter does at every anchor of a set of traces, without a decode loop.

One target pass a batch of traces gives the context features; then the drafter runs at every anchor
of each response, many anchors packed into one pass in which a block sees the context strictly
before its anchor, and itself. The rank of the trace's token, the path and q of every policy, and
the attention mass on context, anchor and drafted rows go into tables (shards of one batch each, so
a killed run goes on where it stopped).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from dflash2_lab.attention_sums import AttentionSums
from dflash2_lab.errors import LabError
from dflash2_lab.kernels.token_rank import token_rank
from dflash2_lab.models.attention import merged_attention, uniform_share
from dflash2_lab.models.config import check_against_target
from dflash2_lab.models.drafter import ContextKeys, Drafter
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.policies import Block, candidates, check_policies, propose
from dflash2_lab.recording_attention import BlockAttention, sampled_anchors
from dflash2_lab.recording_info import run_info
from dflash2_lab.recording_tables import anchor_table, slot_tables
from dflash2_lab.sampling import Sampling, row_key, uniforms
from dflash2_lab.schema import empty_frame
from dflash2_lab.tables import Run, open_folder, shard_done, write_run_info, write_shard
from dflash2_lab.target import Target, features


@dataclass(frozen=True)
class RecordOptions:
    """`batch_size` traces share a target pass and a shard; `anchor_stride` n records every n-th
    anchor; `memory_gb` bounds the working memory of one packed drafter pass; `attention_sample` is
    the number of anchors a trace, evenly spread, whose attention is kept key by key."""

    policies: tuple[str, ...]
    anchor_stride: int = 1
    batch_size: int = 8
    memory_gb: float = 0.5
    keep_candidates: bool = False
    attention: bool = True
    attention_sample: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("anchor_stride", "batch_size"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: found {getattr(self, name)}, expected 1 or more")
        if self.attention_sample < 0:
            raise LabError(f"attention_sample: found {self.attention_sample}, expected 0 or more")
        if not self.memory_gb > 0:
            raise LabError(f"memory_gb: found {self.memory_gb}, expected a positive number")

    @property
    def tables(self) -> tuple[str, ...]:
        """Tables that every shard of the run has."""
        optional = {
            "attention": self.attention,
            "block_attention": self.attention_sample > 0,
            "candidates": self.keep_candidates,
        }
        return ("anchors", "slots", "paths", *(name for name, on in optional.items() if on))


def record(
    target: Target,
    drafter: Drafter,
    traces: Run,
    policies: Sequence[str] | None = None,
    out: Path | str | None = None,
    anchor_stride: int = 1,
    keep_candidates: bool = False,
    **options: object,
) -> Run:
    """Record what `drafter` proposes at every anchor of `traces`, without a decode loop.

    Args:
        traces: a run of `trace` or `import_traces`; off-policy ones are recorded and marked.
        policies: how drafts are chosen; by default all that the drafter has and that differ at the
            traces' temperature.
        out: run folder, resumed when it holds a run of the same settings; without it the run stays
            in a temporary folder.
        anchor_stride: record every n-th anchor; only 1 can be replayed.
        keep_candidates: keep the candidates of each slot with their scores.
        options: further fields of `RecordOptions`: batch_size, memory_gb (GiB of working memory),
            attention, attention_sample (anchors a response), seed.

    Returns:
        A run of kind `record` with the tables `anchors`, `slots`, `paths`, `attention`, and on
        request `candidates` and `block_attention`; columns as in `schema`.

    Raises:
        LabError: a drafter that does not fit the target, a policy that it lacks, traces without a
            slot or of another vocabulary, bad options, a folder of another run, or a full disk.
    """
    sampling = Sampling(**traces.info["sampling"])
    chosen = tuple(policies) if policies else default_policies(drafter, sampling)
    check_policies(chosen, drafter.settings.kind)
    settings = RecordOptions(chosen, anchor_stride, keep_candidates=keep_candidates, **options)
    size = (target.hidden_size, target.vocab_size, target.num_layers)
    check_against_target(drafter.settings, *size, target.name)
    frame = traces.traces
    _check_traces(frame, target)
    info = run_info(target, drafter, traces, settings)
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="dflash2-lab-record-"))
    open_folder(folder, info)
    num_shards = -(-len(frame) // settings.batch_size)
    anchors = int((frame["response_ids"].map(len) - 1).clip(lower=0).sum())
    progress = tqdm(total=anchors, desc=f"record {drafter.name}", unit="anchor", delay=2)
    for shard in range(num_shards):
        rows = frame.iloc[shard * settings.batch_size : (shard + 1) * settings.batch_size]
        if not shard_done(folder, settings.tables, shard):
            tables = record_batch(target, drafter, rows, sampling, settings)
            for name in settings.tables:
                write_shard(folder, name, shard, tables[name])
        progress.update(int((rows["response_ids"].map(len) - 1).clip(lower=0).sum()))
    progress.close()
    write_run_info(folder, info | {"complete": True})
    return Run.open(folder)


def _check_traces(frame: pd.DataFrame, target: Target) -> None:
    if not (frame["response_ids"].map(len) >= 2).any():
        raise LabError("traces: no response has two tokens, so there is no slot to record")
    for row in frame.itertuples(index=False):
        where = f"traces: prompt {row.prompt_id!r}, turn {row.turn}, sample {row.sample}"
        if len(row.prompt_ids) == 0:
            raise LabError(f"{where}: the prompt has no token, so the first anchor has no context")
        highest = np.concatenate([row.prompt_ids, row.response_ids]).max()
        if highest >= target.vocab_size:
            raise LabError(
                f"{where}: found token {highest}, but target {target.name} has "
                f"{target.vocab_size} tokens (traced with another target?)"
            )


def default_policies(drafter: Drafter, sampling: Sampling) -> tuple[str, ...]:
    """Every policy of the drafter's kind that is not another one's double at this temperature."""
    own = {"dflash": (), "dflash2": ("selector",), "dspark": ("markov",)}[drafter.settings.kind]
    if sampling.greedy:
        return ("top1", *own)
    return ("top1", "sampled", *own, *(f"{policy}_greedy" for policy in own))


@torch.inference_mode()
def record_batch(
    target: Target,
    drafter: Drafter,
    rows: pd.DataFrame,
    sampling: Sampling,
    options: RecordOptions,
) -> dict[str, pd.DataFrame]:
    """The tables of one batch of traces."""
    sequences = [
        np.concatenate([prompt, response]).astype(np.int64)
        for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True)
    ]
    parts: dict[str, list[pd.DataFrame]] = {name: [] for name in options.tables}
    row_bytes = 2 * target.dtype.itemsize * (drafter.fc.in_features + 8 * target.hidden_size)
    for group in token_groups(list(map(len, sequences)), int(options.memory_gb * 1e9 / row_bytes)):
        padded = np.zeros((len(group), max(len(sequences[row]) for row in group)), dtype=np.int64)
        for place, row in enumerate(group):
            padded[place, : len(sequences[row])] = sequences[row]
        # Padding on the right lies behind every anchor's context: causal attention needs no mask.
        ids = torch.from_numpy(padded).to(target.device)
        context, _ = features(target, ids, drafter.settings.target_layer_ids)
        keys = drafter.context_keys(context.to(drafter.dtype))
        for place, row in enumerate(group):
            length = len(sequences[row])
            own = [(k[place, None, :, :length], v[place, None, :, :length]) for k, v in keys]
            trace = next(rows.iloc[row : row + 1].itertuples(index=False))
            if len(trace.response_ids) < 2:
                continue
            recorded = record_trace(
                target, drafter, ids[place, :length], own, trace, sampling, options
            )
            for name, frame in recorded.items():
                parts[name].append(frame)
    return {
        name: pd.concat(frames, ignore_index=True) if frames else empty_frame(name)
        for name, frames in parts.items()
    }


def token_groups(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Neighbouring rows whose padded sizes stay within `max_tokens` (a longer row goes alone)."""
    groups: list[list[int]] = []
    widest = 0
    for row, length in enumerate(lengths):
        widest = max(widest, length)
        if not groups or widest * (len(groups[-1]) + 1) > max_tokens:
            groups.append([])
            widest = length
        groups[-1].append(row)
    return groups


def record_trace(
    target: Target,
    drafter: Drafter,
    ids: Int[Tensor, " S"],
    keys: ContextKeys,
    row: object,
    sampling: Sampling,
    options: RecordOptions,
) -> dict[str, pd.DataFrame]:
    """The tables of one trace, its anchors cut into tiles that respect the memory cap."""
    num_draft = drafter.settings.num_draft
    prompt_length, length = len(row.prompt_ids), len(row.response_ids)
    recorded = np.arange(0, length - 1, options.anchor_stride)
    sums = AttentionSums() if options.attention else None
    kept = None
    if options.attention_sample:
        sample = sampled_anchors(recorded, options.attention_sample)
        kept = BlockAttention(drafter, prompt_length + sample)
    tile = anchors_per_tile(drafter, len(ids), options.memory_gb)
    outputs: dict[str, list[np.ndarray]] = {}
    for first in range(0, len(recorded), tile):
        chosen = recorded[first : first + tile]
        draws = torch.from_numpy(chosen[:, None] * num_draft + np.arange(num_draft)).to(ids.device)
        seeds = {
            policy: row_key(options.seed, row.prompt_id, row.turn, row.sample, policy)
            for policy in options.policies
        }
        block = Block(
            drafter=drafter,
            sampling=sampling,
            uniforms={
                policy: uniforms(torch.full_like(draws, seed), draws)
                for policy, seed in seeds.items()
            },
            **draft_tile(target, drafter, ids, keys, prompt_length + chosen, sums, kept),
        )
        for name, value in tile_values(block, options).items():
            outputs.setdefault(name, []).append(value.cpu().numpy())
    key = {"prompt_id": row.prompt_id, "turn": row.turn, "sample": row.sample}
    values = {name: np.concatenate(parts) for name, parts in outputs.items()}
    tables = slot_tables(key, recorded, length, np.asarray(row.logprob), values, options.policies)
    tables["anchors"] = anchor_table(key, recorded, row, num_draft)
    if sums is not None:
        tables["attention"] = sums.frame(key)
    if kept is not None:
        tables["block_attention"] = kept.frame(key, prompt_length)
    return tables


def anchors_per_tile(drafter: Drafter, context: int, memory_gb: float) -> int:
    """Anchors whose logits (fp32 and two comparisons) and attention mask fit in `memory_gb`."""
    settings = drafter.settings
    repeat = settings.num_attention_heads // settings.num_key_value_heads
    logits = settings.num_draft * settings.vocab_size * 12
    mask = repeat * settings.block_size * context * 8
    return max(1, int(memory_gb * 1e9 / (logits + mask)))


def draft_tile(
    target: Target,
    drafter: Drafter,
    ids: Int[Tensor, " S"],
    keys: ContextKeys,
    positions: Int[np.ndarray, " n"],
    sums: AttentionSums | None = None,
    kept: BlockAttention | None = None,
) -> dict[str, Tensor]:
    """Draft the blocks anchored at `positions` of one sequence, held against what follows there:
    embedding, hidden, logits, before and targets of a `Block`.

    Raises `LabError` naming the first layer whose output is not finite.
    """
    settings = drafter.settings
    anchors = torch.from_numpy(positions).to(ids.device)[None]

    def attend(layer: int, *arguments: object) -> Float[Tensor, "B H A G D"]:
        out, mass = merged_attention(*arguments)
        if sums is not None:
            uniform = uniform_share(positions, settings.block_size, *arguments[-2:])
            rows = drafter.slot_rows(mass)[0], drafter.slot_rows(uniform[..., None])[..., 0]
            sums.add(layer, *rows, positions)
        if kept is not None:
            kept.add(layer, *arguments)
        return out

    embedding = drafter.input_embedding(target.embed_weight)
    embeds = embed_rows(embedding, drafter.block_ids(ids[anchors]), settings.input_embedding_scale)
    hidden = drafter(embeds.to(drafter.dtype), keys, anchors, attend)
    if not torch.isfinite(hidden).all():
        layer = drafter.first_bad_layer(embeds.to(drafter.dtype), keys, anchors)
        raise LabError(f"drafter {drafter.name}: {layer} gives values that are not finite")
    hidden = drafter.slot_rows(hidden)[0]
    offsets = torch.arange(settings.num_draft + 1, device=ids.device)
    # Past the end of the trace there is nothing to hold a slot against; those rows are cut later.
    tokens = ids[(anchors[0, :, None] + offsets).clamp_max(len(ids) - 1)]
    logits = drafter.logits(hidden.to(target.dtype), target.head)
    return {
        "embedding": embedding,
        "hidden": hidden,
        "logits": logits,
        "before": tokens[:, :-1],
        "targets": tokens[:, 1:],
    }


def tile_values(block: Block, options: RecordOptions) -> dict[str, Tensor]:
    """Everything that the tables keep of a tile, one row an anchor: [n, P] or [n, P, ...]."""
    found = candidates(block)
    if not torch.isfinite(found.unary[..., 0]).all():
        raise LabError(
            f"drafter {block.drafter.name}: the output head gives values that are not finite"
        )
    rank = token_rank(block.logits.flatten(0, 1), block.targets.flatten()).view_as(block.targets)
    # Outside a reduced draft vocabulary a token is no choice at all: a miss for every k.
    target_logits = block.logits.gather(-1, block.targets[..., None])[..., 0]
    rank = rank.masked_fill(target_logits == -torch.inf, block.logits.shape[-1])
    values = {"target_token": block.targets, "target_rank": rank}
    for policy in options.policies:
        values[f"{policy}/token"], values[f"{policy}/q_target"] = propose(block, found, policy)
    if options.keep_candidates:
        values |= {"candidates/ids": found.ids, "candidates/unary": found.unary}
        if found.first is not None:
            values |= {"candidates/first": found.first, "candidates/lattice": found.lattice}
    return values
