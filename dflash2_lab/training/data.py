"""Traces as training batches: right-padded sequences with random anchors in the response.

Batch number n depends on (seed, n) alone, so a resumed run sees the same data as an unbroken one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from dflash2_lab.errors import LabError

POOL = 16  # batches that are sorted by length together, so that a batch is little padded


@dataclass(frozen=True)
class Corpus:
    """Token ids of prompt + response, cut to a maximum length, and where the response starts."""

    tokens: tuple[Int[np.ndarray, " S"], ...]
    prompt_lengths: Int[np.ndarray, " N"]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_response_tokens(self) -> int:
        return int(sum(map(len, self.tokens)) - self.prompt_lengths.sum())


@dataclass(frozen=True)
class Batch:
    """One step's sequences and anchors; `anchors` index positions, `labels` the P tokens after."""

    input_ids: Int[Tensor, "B S"]
    anchors: Int[Tensor, "B A"]
    labels: Int[Tensor, "B A P"]
    valid: Bool[Tensor, "B A P"]

    def to(self, device: torch.device) -> "Batch":
        fields = (self.input_ids, self.anchors, self.labels, self.valid)
        if device.type == "cuda":
            fields = tuple(field.pin_memory() for field in fields)
        return Batch(*(field.to(device, non_blocking=True) for field in fields))


def load_corpus(paths: Sequence[Path], max_length: int, held_out: int) -> tuple[Corpus, Corpus]:
    """Training and validation corpora from trace runs (folders) or Parquet files.

    The last `held_out` sequences of each source are for validation. A response needs two tokens
    (an anchor and one target). Raises `LabError` for a source without usable rows.
    """
    parts: tuple[list[pd.DataFrame], list[pd.DataFrame]] = ([], [])
    for path in paths:
        files = sorted(path.glob("traces*.parquet")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise LabError(f"{path}: no traces found (a trace run, or a Parquet file)")
        frame = pd.concat(
            [pd.read_parquet(file, columns=["prompt_ids", "response_ids"]) for file in files]
        )
        room = max_length - frame["prompt_ids"].map(len)
        frame = frame[np.minimum(frame["response_ids"].map(len), room) >= 2]
        if len(frame) <= held_out:
            raise LabError(f"{path}: {len(frame)} usable traces, need more than {held_out}")
        parts[0].append(frame.iloc[: len(frame) - held_out])
        parts[1].append(frame.iloc[len(frame) - held_out :])
    return tuple(_corpus(pd.concat(part), max_length) for part in parts)


def _corpus(frame: pd.DataFrame, max_length: int) -> Corpus:
    tokens = tuple(
        np.concatenate([prompt, response])[:max_length].astype(np.int64)
        for prompt, response in zip(frame["prompt_ids"], frame["response_ids"], strict=True)
    )
    return Corpus(tokens, frame["prompt_ids"].map(len).to_numpy())


def batch_rows(corpus: Corpus, batch_size: int, seed: int, number: int) -> Int[np.ndarray, " B"]:
    """Sequence indices of batch `number`: every sequence once an epoch, alike lengths together."""
    per_epoch = max(1, len(corpus) // batch_size)
    epoch, index = divmod(number, per_epoch)
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(corpus))
    lengths = np.array([len(tokens) for tokens in corpus.tokens])
    pool = POOL * batch_size
    order = np.concatenate(
        [
            chunk[np.argsort(lengths[chunk], kind="stable")]
            for chunk in np.split(order, range(pool, len(order), pool))
        ]
    )
    return order[rng.permutation(per_epoch)[index] * batch_size :][:batch_size]


def make_batch(
    corpus: Corpus, rows: Int[np.ndarray, " B"], num_anchors: int, num_draft: int, seed: int
) -> Batch:
    """Anchors are response positions with at least one token after them, drawn without repeats;
    a response shorter than that fills the rest with blocks that carry no label."""
    rng = np.random.default_rng(seed)
    width = max(len(corpus.tokens[row]) for row in rows)
    width += -width % 64
    ids = np.zeros((len(rows), width + num_draft), dtype=np.int64)
    anchors = np.zeros((len(rows), num_anchors), dtype=np.int64)
    last = np.zeros((len(rows), num_anchors, 1), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens, start = corpus.tokens[row], corpus.prompt_lengths[row]
        ids[place, : len(tokens)] = tokens
        chosen = rng.permutation(np.arange(start, len(tokens) - 1))[:num_anchors]
        anchors[place] = start
        anchors[place, : len(chosen)] = np.sort(chosen)
        last[place, : len(chosen)] = len(tokens) - 1
    position = anchors[..., None] + np.arange(1, num_draft + 1)
    labels = np.take_along_axis(ids[:, None], position, axis=-1)
    arrays = ids[:, :width], anchors, labels, position <= last
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))
