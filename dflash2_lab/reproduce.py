"""The main job: trace the prompts once, record each drafter on the traces, replay, draw."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from dflash2_lab.figures import save_figures
from dflash2_lab.models.io import load_drafter
from dflash2_lab.prompts import load_prompts
from dflash2_lab.provenance import environment
from dflash2_lab.recording import record
from dflash2_lab.recording_figures import record_figures
from dflash2_lab.report import summarise, text_report
from dflash2_lab.tables import (
    Run,
    assert_comparable,
    open_folder,
    write_atomic,
    write_run_info,
)
from dflash2_lab.target import Target
from dflash2_lab.tracing import trace


def main_job(
    target: Target,
    drafters: Sequence[str],
    limit: int,
    max_new_tokens: int,
    out: Path,
    prompts: str = "default",
) -> dict[str, object]:
    """Tables under `out/traces` and `out/<drafter>`, figures under `out/figures`, the summary in
    `out/summary.json`, what was run in `out/run.json`; returns {"text", "json"}. What is already
    there is reused."""
    started = time.perf_counter()
    dtype = str(target.dtype).removeprefix("torch.")
    # Drafters first: one that does not fit is told before the target has traced anything.
    loaded = [load_drafter(name, target, dtype=dtype, device=target.device) for name in drafters]
    info = {"kind": "reproduce", "environment": environment(target.device), "complete": False}
    open_folder(out, info)
    traces = trace(
        target,
        load_prompts(prompts, limit=limit),
        max_new_tokens=max_new_tokens,
        out=out / "traces",
    )
    runs: dict[str, Run] = {}
    for drafter in loaded:
        folder = out / drafter.name.removeprefix("zoo:")
        runs[folder.name] = record(target, drafter, traces, out=folder)
    warnings = assert_comparable(runs)
    summaries = {name: summarise(run) for name, run in runs.items()}
    saved = save_figures(record_figures(runs), out / "figures")
    text = json.dumps(summaries, indent=1, sort_keys=True) + "\n"
    write_atomic(out / "summary.json", lambda handle: handle.write(text.encode()))
    write_run_info(out, info | {"runs": list(runs), "complete": True})
    lines = [
        text_report(summaries, warnings),
        f"tables   {', '.join(str(out / name) for name in runs)}",
        f"figures  {out / 'figures'} (open the .html files in a browser)",
        *([f"         {saved.skipped}"] if saved.skipped else []),
        f"summary  {out / 'summary.json'}   ({time.perf_counter() - started:.0f} s)",
    ]
    return {"text": "\n".join(lines), "json": {"out": str(out), "runs": summaries}}
