"""The five benchmarks that DFlash 2 reports on, as user turns in the shape its evaluation uses.

Downloaded through `datasets` at a fixed revision; no code of the data set's repository is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash2_lab.errors import LabError, first_line

Row = tuple[str, tuple[str, ...], str]  # prompt id, user turns, data set name

_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:"


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark lies on the hub, and how its i-th row becomes an id and user turns."""

    path: str
    config: str | None
    split: str
    revision: str
    row_id: Callable[[int, Mapping[str, Any]], str]
    turns: Callable[[Mapping[str, Any]], tuple[str, ...]]


BENCHMARKS: Mapping[str, Benchmark] = {
    "gsm8k": Benchmark(
        path="openai/gsm8k",
        config="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        row_id=lambda index, row: f"gsm8k/test/{index}",
        turns=lambda row: (f"{row['question']}\n{_REASON}",),
    ),
    "math500": Benchmark(
        path="HuggingFaceH4/MATH-500",
        config=None,
        split="test",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        row_id=lambda index, row: row["unique_id"],
        turns=lambda row: (f"{row['problem']}\n{_REASON}",),
    ),
    "humaneval": Benchmark(
        path="openai/openai_humaneval",
        config=None,
        split="test",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        row_id=lambda index, row: row["task_id"],
        turns=lambda row: (f"{_PROGRAM}\n```python\n{row['prompt']}\n```",),
    ),
    "mbpp": Benchmark(
        path="google-research-datasets/mbpp",
        config="sanitized",
        split="test",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        row_id=lambda index, row: f"mbpp/{row['task_id']}",
        turns=lambda row: (row["prompt"],),
    ),
    "mt_bench": Benchmark(
        path="HuggingFaceH4/mt_bench_prompts",
        config=None,
        split="train",
        revision="e3a795c5e9a82ee40611c416b8a7786c73198991",
        row_id=lambda index, row: f"mt_bench/{index + 81}",  # the source counts questions from 81
        turns=lambda row: tuple(row["prompt"]),
    ),
}


def benchmark_rows(name: str) -> list[Row]:
    """Download a benchmark and format it, in the order of its source.

    Raises:
        LabError: the package `datasets` is missing, or the data set cannot be had.
    """
    benchmark = BENCHMARKS[name]
    where = f"prompts {name}: {benchmark.path} at revision {benchmark.revision}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise LabError(f"{where}: needs the package datasets: pip install datasets") from error
    try:
        rows = load_dataset(
            benchmark.path, benchmark.config, split=benchmark.split, revision=benchmark.revision
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise LabError(
            f"{where} cannot be loaded ({first_line(error)}); without a network give a JSON-lines "
            "file instead"
        ) from error
    return [
        (benchmark.row_id(index, row), benchmark.turns(row), name) for index, row in enumerate(rows)
    ]
