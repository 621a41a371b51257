"""What every benchmark leaves: a run folder with its raw samples, and a table with its bars."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch

from dflash2_lab.bench.timing import Spread
from dflash2_lab.errors import LabError
from dflash2_lab.provenance import environment
from dflash2_lab.tables import check_unclaimed, read_run_info, write_atomic, write_run_info


def check_out(out: Path, bench: str) -> None:
    """Make the run folder, before anything is measured.

    Raises `LabError` for a folder that holds another run, or that cannot be written.
    """
    if (out / "run.json").is_file():
        info = read_run_info(out)
        found = info.get("bench", f"a run of kind {info.get('kind')}")
        if found != bench:
            raise LabError(f"{out}: found {found}, expected a new folder or a run of bench {bench}")
    check_unclaimed(out)
    probe = out / ".writable"
    write_atomic(probe, lambda handle: handle.write(b""))
    probe.unlink()


def finish(
    out: Path,
    bench: str,
    device: torch.device,
    target: Mapping[str, Any],
    result: Mapping[str, Any],
    text: str,
) -> dict[str, Any]:
    """Write `out/run.json`, `out/bench.json` and `out/table.txt`; {"text", "json"} for the command.

    `target` says whose times these are; `result` may hold `Spread`s.
    """
    machine = {"machine": platform.machine(), "processor": platform.processor()}
    info = {
        "kind": "bench",
        "bench": bench,
        "target": dict(target),
        "environment": environment(device) | machine,
    }
    payload = json.dumps(result, indent=1, sort_keys=True, default=_plain, allow_nan=False) + "\n"
    write_atomic(out / "bench.json", lambda handle: handle.write(payload.encode()))
    write_atomic(out / "table.txt", lambda handle: handle.write(f"{text}\n".encode()))
    write_run_info(out, info)
    return {"text": f"{text}\n{out}", "json": json.loads(payload) | {"folder": str(out)}}


def _plain(value: object) -> object:
    if is_dataclass(value):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def load_bench(folder: Path, bench: str) -> dict[str, Any]:
    """The bench.json of a run of this benchmark. Raises `LabError` for any other folder."""
    info = read_run_info(folder)
    found = info.get("bench", f"a run of kind {info.get('kind')}")
    if found != bench:
        raise LabError(f"{folder}: found {found}, expected a run of bench {bench}")
    try:
        return json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{folder / 'bench.json'}: cannot be read ({error})") from error


def verdict(met: bool) -> str:
    return "met" if met else "MISSED"


def at_most(value: float, bar: float, unit: str = "") -> str:
    return f"bar: at most {bar:g}{unit}: {verdict(value <= bar)}"


def at_least(value: float, bar: float, unit: str = "") -> str:
    return f"bar: at least {bar:g}{unit}: {verdict(value >= bar)}"


def with_interval(value: float, low: float, high: float) -> dict[str, Any]:
    """A value and its interval in JSON; an interval of NaN (a single prompt) is None."""
    return {"value": value, "interval": [low, high] if math.isfinite(low + high) else None}


def interval_text(entry: Mapping[str, Any], digits: int = 2) -> str:
    text = f"{entry['value']:.{digits}f}"
    if entry["interval"] is None:
        return text
    low, high = entry["interval"]
    return f"{text} [{low:.{digits}f}, {high:.{digits}f}]"


def micro(spread: Spread) -> list[str]:
    """Table cells of seconds: median and interval in microseconds, and the +-% achieved."""
    us = spread.scaled(1e6)
    places = 1 if us.median < 1e4 else 0
    interval = f"[{us.low:.{places}f}, {us.high:.{places}f}]"
    return [f"{us.median:.{places}f}", interval, f"{100 * us.half_width / abs(us.median):.2f}"]


def speeds(bandwidth: Mapping[str, Spread]) -> str:
    """One line on the memory bandwidth that was measured beside everything else."""
    copy, read = (bandwidth[name].median / 1e12 for name in ("copy", "read"))
    return f"memory bandwidth: copy {copy:.3f} TB/s (read + write), read {read:.3f} TB/s"


def check_counts(**counts: int | Sequence[int]) -> None:
    """Raise LabError for an option that has to be a positive number, or several."""
    for name, found in counts.items():
        values = [found] if isinstance(found, int) else list(found)
        if not values or min(values) < 1:
            raise LabError(f"{name}: found {found}, expected 1 or more")
