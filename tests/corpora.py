"""Small training corpora, written as traces and read back."""

import numpy as np
import pandas as pd

from dflash2_lab.training.data import load_corpus


def write_traces(path, lengths, seed=0, text=None):
    """A Parquet file of prompts and responses; `text(n)` gives response n when not random."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "prompt_ids": rng.integers(4, 264, prompt).tolist(),
            "response_ids": text(n) if text else rng.integers(4, 264, response).tolist(),
        }
        for n, (prompt, response) in enumerate(lengths)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


def a_corpus(tmp_path, num=40, held_out=4, max_length=48, seed=0):
    rng = np.random.default_rng(seed)
    lengths = list(zip(rng.integers(2, 9, num), rng.integers(2, 40, num), strict=True))
    path = write_traces(tmp_path / f"traces-{seed}.parquet", lengths, seed)
    return load_corpus([path], max_length, held_out)
