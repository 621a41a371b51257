"""Tables as `stats` returns them, made up and seeded, for the tests of the figures."""

import numpy as np
import pandas as pd
from recordings import Request, make_run

from dflash2_lab.stats import SuffixDecay
from dflash2_lab.tables import Run

POLICIES = ("top1", "sampled", "selector", "oracle@16")


def recall_table(seed: int = 0, num_draft: int = 7, ks: tuple[int, ...] = (1, 16)) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    rows = []
    for anchors, easier in (("all", 0.0), ("visited", 0.03)):
        for metric in ("position_recall", "conditional_recall"):
            for k in ks:
                rate = 0.82 if k == 1 else 0.97
                fall = rate if metric == "position_recall" else 0.97
                for slot in range(1, num_draft + 1):
                    value = rate * fall ** (slot - 1) - easier + rng.normal(0, 0.004)
                    half = 0.01 + 0.004 * slot
                    rows.append((anchors, metric, k, slot, value, value - half, value + half, 900))
    columns = ["anchors", "metric", "k", "slot", "value", "low", "high", "num_blocks"]
    return pd.DataFrame(rows, columns=columns)


def acceptance_table(shift: float = 0.0, policies: tuple[str, ...] = POLICIES) -> pd.DataFrame:
    lengths = {"top1": 3.25, "sampled": 3.31, "selector": 3.60, "oracle@16": 6.47}
    rows = []
    for policy in policies:
        for aggregation, move in (("pooled", 0.0), ("per_request", 0.09)):
            for terminal, uncut in (("with", 0.0), ("without", 0.06)):
                value = lengths.get(policy, 3.0) + shift + move + uncut
                rows.append((policy, aggregation, terminal, value, value - 0.14, value + 0.15, 500))
    columns = ["policy", "aggregation", "terminal", "value", "low", "high", "num_steps"]
    return pd.DataFrame(rows, columns=columns)


def decay_tables(rate: float = 0.83, num_draft: int = 7) -> tuple[pd.DataFrame, SuffixDecay]:
    slots = np.arange(1, num_draft + 1)
    value = 0.82 * rate ** (slots - 1)
    curve = pd.DataFrame({"slot": slots, "value": value, "low": value - 0.02, "high": value + 0.02})
    slope, drop = float(np.log(rate)), float(value[0] - value[-1])
    return curve, SuffixDecay(
        slope=slope,
        slope_low=slope - 0.01,
        slope_high=slope + 0.01,
        drop=drop,
        drop_low=drop - 0.03,
        drop_high=drop + 0.03,
    )


def attention_table(
    shares: tuple[float, ...] = (0.333, 0.246, 0.114, 0.049, 0.005), num_draft: int = 7
) -> pd.DataFrame:
    rows = []
    for layer, share in enumerate(shares):
        for slot in range(num_draft + 1):
            whole = share * (1 + 0.05 * (slot - num_draft / 2) if slot else 1)
            split = {"anchor": 0.35 * whole, "drafted": 0.65 * whole, "within_block": whole}
            for group, value in {"context": 1 - whole, **split}.items():
                rows.append((layer, slot, group, value, value * 0.93, value * 1.06, 0.047, 9000))
    columns = ["layer", "slot", "group", "value", "low", "high", "uniform", "count"]
    return pd.DataFrame(rows, columns=columns)


def recorded_run(
    name: str = "dflash2",
    seed: int = 0,
    num_draft: int = 4,
    datasets: tuple[str, ...] = ("gsm8k",),
    attention: bool = True,
    num_prompts: int = 5,
    **info: object,
) -> Run:
    """A small greedy recording with every table the figures and the report read."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(num_prompts):
        length = int(rng.integers(12, 24))
        rank = rng.choice([0, 1, 20], size=(length - 1, num_draft), p=[0.6, 0.3, 0.1])
        top1 = np.where((rank == 0).all(axis=1), num_draft, (rank != 0).argmax(axis=1))
        within = np.where((rank < 16).all(axis=1), num_draft, (rank >= 16).argmax(axis=1))
        better = np.minimum(within, top1 + rng.integers(0, 2, length - 1))
        requests.append(
            Request(
                response_len=length,
                accept={"top1": top1, "selector": better},
                rank=rank,
                prompt_id=f"p{index}",
                dataset=datasets[index % len(datasets)],
                finish="eos",
            )
        )
    run = make_run(requests, num_draft, target={"name": "smollm2-135m"}, **info)
    run.info["drafter"]["name"] = name
    if not attention:
        return run
    grid = [
        (f"p{p}", layer, slot)
        for p in range(num_prompts)
        for layer in range(3)
        for slot in range(1, num_draft + 1)
    ]
    table = pd.DataFrame(grid, columns=["prompt_id", "layer", "slot"])
    table = table.assign(turn=0, sample=0, head=0, context_bin="0-255", count=10, sum_uniform=0.5)
    table["sum_anchor"] = 1.0 / (1 + table["layer"])
    table["sum_drafted"] = 0.5 * table["slot"] / (1 + table["layer"])
    table["sum_context"] = 10 - table["sum_anchor"] - table["sum_drafted"]
    table["sumsq_within"] = (table["sum_anchor"] + table["sum_drafted"]) ** 2 / 10
    return Run.in_memory(run.info, {**run.frames, "attention": table})
