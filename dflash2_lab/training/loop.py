"""The training loop: frozen target, features on the fly, bf16 working weights with fp32 masters.

A run folder holds `train.jsonl` (one line a report), `checkpoint.pt` (masters, optimizer, step) and
at the end the drafter in the published layout and run.json. A killed run goes on from its last
checkpoint with the batches that an unbroken run would have seen.
"""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from dflash2_lab.errors import LabError
from dflash2_lab.kernels.candidate_selector import pairwise_scores
from dflash2_lab.kernels.candidate_topk import candidate_topk
from dflash2_lab.models.config import to_zlab
from dflash2_lab.models.drafter import Drafter
from dflash2_lab.models.io import save_drafter
from dflash2_lab.models.layers import embed_rows
from dflash2_lab.provenance import environment
from dflash2_lab.tables import (
    CHECKPOINT_FILE,
    RUN_INFO_FILE,
    read_run_info,
    write_atomic,
    write_run_info,
)
from dflash2_lab.target import Target, features
from dflash2_lab.training.data import Batch, Corpus, batches, make_batch, prefetch
from dflash2_lab.training.losses import backbone_loss, selector_loss, slot_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainConfig:
    """Hyper-parameters. `decay` is in slots; `soft_labels` is the weight of the target's own law
    beside the trace's token; `warmup` is a fraction of `steps`."""

    steps: int = 1000
    batch_size: int = 64
    num_anchors: int = 64
    max_length: int = 512
    learning_rate: float = 1e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    decay: float = 4.0
    soft_labels: float = 0.5
    selector_weight: float = 1.0
    held_out: int = 64
    report_every: int = 200
    checkpoint_every: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "num_anchors", "max_length", "held_out")
        for name in (*counts, "report_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise LabError(f"{name}: found {getattr(self, name)}, expected 1 or more")
        for name in ("learning_rate", "clip", "decay"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name}: found {getattr(self, name)}, expected more than 0")
        for name in ("warmup", "soft_labels"):
            if not 0 <= getattr(self, name) <= 1:
                raise LabError(f"{name}: found {getattr(self, name)}, expected 0 to 1")


def train(
    target: Target,
    drafter: Drafter,
    corpus: Corpus,
    validation: Corpus,
    config: TrainConfig,
    out: Path,
) -> dict[str, Any]:
    """Train `drafter` in place (on the target's device and dtype), save it as `out/drafter` and
    return the last report.

    Resumes from `out/checkpoint.pt` when config, drafter and data are the same. Raises `LabError`
    for a checkpoint of another run, a drafter or target that cannot be trained here, and a loss
    that is not finite.
    """
    _check_trainable(target, drafter)
    if (out / RUN_INFO_FILE).is_file() and read_run_info(out).get("kind") != "train":
        raise LabError(f"{out}: holds a run of tables; choose another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{out}: cannot be made a folder ({error.strerror})") from error
    drafter.to(device=target.device, dtype=target.dtype).train()
    params = [p for p in drafter.parameters() if p.requires_grad]
    masters = [p.detach().float().clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(
        masters,
        lr=config.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=config.weight_decay,
        fused=target.device.type == "cuda",
    )
    run = {
        "config": dataclasses.asdict(config),
        "drafter": to_zlab(drafter.settings),
        "data": [corpus.digest(), validation.digest()],
    }
    first = _restore(out / CHECKPOINT_FILE, run, masters, optimizer)
    log_path = out / "train.jsonl"
    _keep_reports(log_path, first)
    with torch.no_grad():
        torch._foreach_copy_(params, masters)
    source = prefetch(
        batches(
            corpus,
            config.batch_size,
            config.num_anchors,
            drafter.settings.num_draft,
            config.seed,
            first,
        )
    )
    started = time.perf_counter()
    progress = tqdm(range(first, config.steps), initial=first, total=config.steps, desc="train")
    for step in progress:
        batch = next(source).to(target.device)
        losses = step_losses(target, drafter, batch, config)
        total = losses["backbone"] + config.selector_weight * losses.get("selector", 0.0)
        total.backward()
        for param, master in zip(params, masters, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        norm = torch.nn.utils.clip_grad_norm_(masters, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(step, config)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        last = step + 1 == config.steps
        reports = (step + 1) % config.report_every == 0 or last
        saves = (step + 1) % config.checkpoint_every == 0 or last
        if reports or saves:  # reading a number waits for the device, so not in every step
            record = {name: value.item() for name, value in losses.items()}
            record["grad_norm"] = norm.item()
            if not all(map(math.isfinite, record.values())):
                raise LabError(f"training diverged at or before step {step + 1}: {record}")
        if reports:
            record |= {"step": step + 1, "lr": group["lr"]}
            record["steps_per_second"] = (step + 1 - first) / (time.perf_counter() - started)
            record |= validate(target, drafter, validation, config)
            log = [*_lines(log_path), json.dumps(record) + "\n"]
            write_atomic(log_path, lambda handle, log=log: handle.write("".join(log).encode()))
            progress.set_postfix(
                loss=f"{record['backbone']:.3f}", recall=f"{record['recall@1'][0]:.3f}"
            )
        if saves:
            _checkpoint(out / CHECKPOINT_FILE, run, masters, optimizer, step + 1)
    drafter.eval()
    save_drafter(drafter, out / "drafter")
    made = {"target": dict(target.identity), "environment": environment(target.device)}
    write_run_info(out, {"kind": "train", "complete": True} | run | made)
    return json.loads(log_path.read_text().splitlines()[-1])


def _check_trainable(target: Target, drafter: Drafter) -> None:
    if drafter.settings.kind not in ("dflash", "dflash2"):
        raise LabError(f"train: found a {drafter.settings.kind} drafter, can train dflash, dflash2")
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        raise LabError("train: the drafter has an embedding or head of its own, expected none")
    if not isinstance(target.head, torch.nn.Linear) or target.head.bias is not None:
        raise LabError(
            f"train: the head of target {target.name} is no plain matrix ({target.head}), and the "
            "loss multiplies by its weight"
        )


def schedule(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to zero."""
    warmup = max(1, round(config.warmup * config.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, config.steps - warmup)))


def step_losses(
    target: Target, drafter: Drafter, batch: Batch, config: TrainConfig
) -> dict[str, Float[Tensor, ""]]:
    """Backbone loss, and the selector's for DFlash 2, of one batch."""
    hidden, teacher = forward_batch(target, drafter, batch)
    weights = slot_weights(batch.valid, config.decay)
    kept = batch.labelled  # only rows with a label reach the head
    hidden, teacher = hidden.flatten(0, 2)[kept], teacher.flatten(0, 2)[kept]
    labels, weights = batch.labels.flatten()[kept], weights.flatten()[kept]
    head = target.head.weight
    loss, ids = backbone_loss(drafter, hidden, head, labels, weights, teacher, config.soft_labels)
    losses = {"backbone": loss}
    if drafter.settings.kind == "dflash2":
        predecessors = previous_tokens(batch).flatten()[kept]
        losses["selector"] = selector_loss(
            drafter, hidden, head, target.embed_weight, ids, predecessors, labels, weights
        )
    return losses


def previous_tokens(batch: Batch) -> Tensor:
    """The trace's token before each slot: the anchor for slot 1. [B, A, P]"""
    anchor_ids = batch.input_ids.gather(1, batch.anchors)
    return torch.cat([anchor_ids[..., None], batch.labels[..., :-1]], dim=-1)


def forward_batch(target: Target, drafter: Drafter, batch: Batch) -> tuple[Tensor, Tensor]:
    """Draft hidden states of the slots, and the target's final hidden state before each slot's
    token. Both [B, A, P, H]."""
    # Right padding lies behind every token and anchor, so causal attention needs no mask for it.
    context, final = features(target, batch.input_ids, drafter.settings.target_layer_ids)
    blocks = drafter.block_ids(batch.input_ids.gather(1, batch.anchors))
    embeds = embed_rows(target.embed_weight, blocks, drafter.settings.input_embedding_scale)
    hidden = drafter(embeds, drafter.context_keys(context), batch.anchors)
    slots = torch.arange(batch.labels.shape[-1], device=batch.anchors.device)
    before = (batch.anchors[..., None] + slots).clamp_max(final.shape[1] - 1).flatten(1)
    teacher = final.gather(1, before[..., None].expand(-1, -1, final.shape[-1]))
    return drafter.slot_rows(hidden), teacher.unflatten(1, batch.labels.shape[1:])


@torch.no_grad()
def validate(
    target: Target, drafter: Drafter, corpus: Corpus, config: TrainConfig
) -> dict[str, list[float | None]]:
    """Marginal recall by slot on held-out text (unary candidates), and for DFlash 2 how often the
    teacher-forced selector's choice is the trace's token; None for a slot without any label."""
    num_draft, num_candidates = drafter.settings.num_draft, drafter.settings.selector_top_k or 16
    counts = torch.zeros(4, num_draft, device=target.device)
    drafter.eval()
    for start in range(0, len(corpus), config.batch_size):
        rows = range(start, min(start + config.batch_size, len(corpus)))
        rng = np.random.default_rng(config.seed)
        batch = make_batch(corpus, rows, 16, num_draft, rng).to(target.device)
        hidden = forward_batch(target, drafter, batch)[0].flatten(0, 2)
        unary, ids = candidate_topk(drafter.logits(hidden, target.head), num_candidates)
        found = ids == batch.labels.flatten()[:, None]
        hits = [found[:, 0], found.any(-1)]
        if drafter.settings.kind == "dflash2":
            selector, embedding = drafter.candidate_selector, target.embed_weight
            pairwise = pairwise_scores(
                selector.predecessor(previous_tokens(batch).flatten(), embedding),
                selector.hidden_projection(hidden),
                selector.successor(ids, embedding),
            )
            choice = (unary.float() + pairwise).argmax(-1, keepdim=True)
            hits.append(found.gather(-1, choice)[:, 0])
        valid = batch.valid.flatten(0, 1)
        for row, hit in enumerate(hits):
            counts[row] += (hit.view_as(valid) & valid).sum(0)
        counts[3] += valid.sum(0)
    drafter.train()
    *hit_counts, totals = counts.tolist()
    rates = [
        [hit / total if total else None for hit, total in zip(row, totals, strict=True)]
        for row in hit_counts
    ]
    result = {"recall@1": rates[0], f"recall@{num_candidates}": rates[1]}
    if drafter.settings.kind == "dflash2":
        result["selector_accuracy"] = rates[2]
    return result


def _keep_reports(path: Path, first: int) -> None:
    """Drop what a killed run reported after its last checkpoint: those steps come again."""
    if not path.exists():
        return
    lines = _lines(path)
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= first]
    write_atomic(path, lambda handle: handle.write("".join(kept).encode()))


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.exists() else []


def _checkpoint(
    path: Path,
    run: Mapping[str, Any],
    masters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    step: int,
) -> None:
    state = {
        "run": dict(run),
        "masters": [master.detach() for master in masters],
        "optimizer": optimizer.state_dict(),
        "step": step,
    }
    write_atomic(path, lambda handle: torch.save(state, handle))


def _restore(
    path: Path,
    run: Mapping[str, Any],
    masters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name, value in run.items():
        if state["run"][name] != value:
            raise LabError(
                f"{path}: made by another run; found {name} {state['run'][name]}, expected {value}"
            )
    with torch.no_grad():
        for master, saved in zip(masters, state["masters"], strict=True):
            master.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    log.info("resumed from step %d", state["step"])
    return state["step"]
