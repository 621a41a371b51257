"""Traces as training batches: right-padded sequences with random anchors in the response.

Batch number n depends on (corpus, seed, n) alone: a resumed run sees what an unbroken one sees.
"""

import contextlib
import hashlib
import itertools
import queue
import threading
from collections.abc import Iterator, Sequence
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

    def digest(self) -> str:
        """sha256 over all token ids and prompt lengths, in order."""
        digest = hashlib.sha256(self.prompt_lengths.astype(np.int64).tobytes())
        for tokens in self.tokens:
            digest.update(np.int64(len(tokens)).tobytes() + tokens.tobytes())
        return digest.hexdigest()

    @property
    def num_response_tokens(self) -> int:
        return int(sum(map(len, self.tokens)) - self.prompt_lengths.sum())


@dataclass(frozen=True)
class Batch:
    """One step's sequences and anchors; `anchors` index positions, `labels` the P tokens after.

    `labelled` are the flat indices of the slots that have a label, found here and not on the
    device, which would have to be waited for.
    """

    input_ids: Int[Tensor, "B S"]
    anchors: Int[Tensor, "B A"]
    labels: Int[Tensor, "B A P"]
    valid: Bool[Tensor, "B A P"]
    labelled: Int[Tensor, " N"]

    def to(self, device: torch.device) -> "Batch":
        fields = (self.input_ids, self.anchors, self.labels, self.valid, self.labelled)
        if device.type == "cuda":
            fields = tuple(field.pin_memory() for field in fields)
        return Batch(*(field.to(device, non_blocking=True) for field in fields))


def load_corpus(paths: Sequence[Path], max_length: int, held_out: int) -> tuple[Corpus, Corpus]:
    """Training and validation corpora from trace runs (folders) or Parquet files.

    The last `held_out` sequences of each source are for validation. A response needs two tokens
    (an anchor and one target), a prompt one (the first anchor's context). Raises `LabError` for a
    source that cannot be read or has too few such rows.
    """
    parts: tuple[list[pd.DataFrame], list[pd.DataFrame]] = ([], [])
    for path in paths:
        files = sorted(path.glob("traces*.parquet")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise LabError(f"{path}: no traces found (a trace run, or a Parquet file)")
        try:
            columns = ["prompt_ids", "response_ids"]
            frame = pd.concat([pd.read_parquet(file, columns=columns) for file in files])
        except (OSError, ValueError) as error:
            raise LabError(f"{path}: no readable traces: {error}") from error
        prompt, response = (frame[name].map(len) for name in columns)
        frame = frame[(prompt >= 1) & (np.minimum(response, max_length - prompt) >= 2)]
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


def batches(
    corpus: Corpus, batch_size: int, num_anchors: int, num_draft: int, seed: int, first: int
) -> Iterator[Batch]:
    """Batches number `first`, first + 1, ... without end: every sequence once an epoch (less those
    that do not fill a batch), sequences of like length together."""
    per_epoch = max(1, len(corpus) // batch_size)
    lengths = np.array([len(tokens) for tokens in corpus.tokens])
    pool = POOL * batch_size
    for epoch in itertools.count(first // per_epoch):
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(corpus))[: per_epoch * batch_size]
        pools = np.split(order, range(pool, len(order), pool))
        order = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools])
        starts = rng.permutation(per_epoch) * batch_size
        skipped = first - epoch * per_epoch if epoch == first // per_epoch else 0
        for index in range(skipped, per_epoch):
            rows = order[starts[index] : starts[index] + batch_size]
            draws = np.random.default_rng((seed, epoch, index))
            yield make_batch(corpus, rows, num_anchors, num_draft, draws)


def make_batch(
    corpus: Corpus,
    rows: Sequence[int],
    num_anchors: int,
    num_draft: int,
    rng: np.random.Generator,
) -> Batch:
    """Anchors are response positions with at least one token after them, drawn without repeats;
    a response shorter than that fills the rest with blocks that carry no label."""
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
    valid = position <= last
    labelled = np.flatnonzero(valid)
    arrays = ids[:, :width], anchors, labels, valid, labelled
    return Batch(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays))


def prefetch(source: Iterator[Batch], depth: int = 4) -> Iterator[Batch]:
    """Draw from `source` on a thread, up to `depth` batches ahead; its errors surface here."""
    ready: queue.Queue[Batch | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Batch | BaseException) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.1)

    def work() -> None:
        try:
            for batch in source:
                put(batch)
                if stop.is_set():
                    return
        except BaseException as error:  # handed to the consumer, which raises it
            put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
