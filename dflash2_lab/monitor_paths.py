"""How the anytime monitor's evidence grows with the tokens, for a right decoder and broken ones.

    python -m dflash2_lab.monitor_paths FOLDER

decodes the toy of `losslessness` under faults of its catalogue, several runs each, and leaves the
table `monitor_paths.parquet` beside a run.json: the data of `plots.monitor_path`.
"""

import argparse
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from dflash2_lab.losslessness.battery import Budget, Emitted
from dflash2_lab.losslessness.faults import find_fault
from dflash2_lab.losslessness.monitor import log_e_process, stops_at
from dflash2_lab.losslessness.scoring import Scores
from dflash2_lab.losslessness.toy import make_toy
from dflash2_lab.losslessness.toy_decoding import decode
from dflash2_lab.losslessness.toy_observing import observe_tokens
from dflash2_lab.provenance import environment
from dflash2_lab.results import MONITOR_KIND, MONITOR_TABLE
from dflash2_lab.tables import write_atomic, write_run_info

DECODERS = (
    "correct",
    "residual-argmax",
    "q-unary-only",
    "residual-is-p",
    "ratio-times-1.3",
    "wrong-anchor-draw",
)
NUM_STREAMS = 8


def monitor_paths(
    decoders: Sequence[str] = DECODERS,
    num_tokens: int = 16_384,
    num_runs: int = 24,
    points_per_octave: int = 4,
    seed: int = 0,
) -> pd.DataFrame:
    """log E after a growing number of tokens.

    Args:
        decoders: names of the catalogue, faults or controls ("correct" is one).
        num_tokens: tokens of a run, from 8 streams in turn; a multiple of 8.
        num_runs: independent runs of each decoder.
        points_per_octave: numbers of tokens kept between n and 2 n.
        seed: of everything drawn.

    Returns:
        Frame with the columns decoder, run, tokens, log_e (natural logarithm), stopped_at (tokens
        at which the run first reached the stopping level, over every token; 0: never) and
        log_level (that level, -log of the monitor's share of the budget).

    Raises:
        LabError: an unknown name, or tokens that do not divide over the streams.
    """
    toy = make_toy()
    level = Budget().level("monitor")
    octaves = np.arange(3 * points_per_octave, int(np.log2(num_tokens)) * points_per_octave + 1)
    tokens = np.unique(np.round(2 ** (octaves / points_per_octave)).astype(int))
    parts = []
    for name in decoders:
        entropy = seed, zlib.crc32(name.encode())
        decoded = decode(toy, find_fault(name).rules, num_tokens, num_runs, NUM_STREAMS, entropy)
        for run in range(num_runs):
            emitted = _in_turn(observe_tokens(toy, decoded.run(run), num_tokens))
            log_e = log_e_process(emitted, np.random.default_rng((*entropy, run)))
            part = {"decoder": name, "run": run, "tokens": tokens, "log_e": log_e[tokens - 1]}
            stopped = stops_at(log_e, level) or 0
            parts.append(pd.DataFrame(part | {"stopped_at": stopped, "log_level": -np.log(level)}))
    return pd.concat(parts, ignore_index=True)


def _in_turn(emitted: Emitted) -> Emitted:
    """The tokens as they come off the streams: the first of every stream, then the second, ..."""
    turn = np.lexsort((emitted.stream, emitted.order))
    scores = Scores(*(None if part is None else part[turn] for part in emitted.scores))
    return Emitted(scores, *(part[turn] for part in emitted[1:]))


def main(argv: Sequence[str] | None = None) -> None:
    """Write the table and its run.json into the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m dflash2_lab.monitor_paths")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    frame = monitor_paths(seed=arguments.seed)
    path = arguments.folder / MONITOR_TABLE
    write_atomic(path, lambda handle: frame.to_parquet(handle, compression="zstd", index=False))
    made = environment(torch.device("cpu"))
    info = {"kind": MONITOR_KIND, "seed": arguments.seed, "environment": made, "complete": True}
    write_run_info(arguments.folder, info)


if __name__ == "__main__":
    main()
