"""Options of the bench commands; like `cli`, it imports nothing heavy."""

import argparse
from pathlib import Path
from typing import Any

from dflash2_lab.console import Help
from dflash2_lab.shared_options import output_options, prompt_options, run_later, target_options


def add_benchmarks(command: argparse.ArgumentParser) -> None:
    """The benchmarks as commands of their own below `command`."""
    kinds = command.add_subparsers(title="benchmarks", metavar="BENCH", required=True)
    _record(kinds)
    _cycle(kinds)
    _throughput(kinds)
    _kernels(kinds)
    _speedup(kinds)


def _add(kinds: Any, name: str, summary: str, text: str) -> argparse.ArgumentParser:
    command = kinds.add_parser(name, help=summary, description=text, formatter_class=Help)
    command.set_defaults(run=run_later(name, "bench_commands"))
    return command


def _finish(command: argparse.ArgumentParser, name: str) -> None:
    folder = Path(f"runs/bench-{name}")
    command.add_argument("--out", type=Path, default=folder, help="run folder")
    output_options(command)


def _device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--device", default=None, help="cpu or cuda; default: cuda if there is one"
    )


def _record(kinds: Any) -> None:
    summary = "time recording against stepping the reference package, and attention shares"
    command = _add(kinds, "record", summary, "Time recording.")
    target_options(command)
    command.add_argument("--drafter", default="zoo:dflash2", help="a folder, a hub id, or zoo:NAME")
    command.add_argument("--limit", type=int, default=4, help="prompts")
    command.add_argument("--max-new-tokens", type=int, default=96, help="response tokens")
    command.add_argument("--repeats", type=int, default=3, help="rounds of all sides")
    _finish(command, "record")


def _cycle(kinds: Any) -> None:
    command = _add(
        kinds,
        "cycle",
        "time a whole draft-verify cycle of every kind of drafter against its floor",
        "Time a whole draft-verify cycle of the graph engine with random weights and forced\n"
        "acceptance: plain decoding, DFlash, DFlash 2 with its conv alone and with its selector,\n"
        "DSpark, and a deeper DFlash, in turns; and the published package, if it is installed.",
    )
    command.add_argument(
        "--shapes",
        default=None,
        choices=("qwen3-4b", "smollm2-135m", "tiny"),
        help="default: qwen3-4b with a GPU, tiny without",
    )
    command.add_argument(
        "--batch", type=int, nargs="+", default=[1], metavar="N", help="sequences decoded together"
    )
    command.add_argument(
        "--num-draft",
        type=int,
        nargs="+",
        default=None,
        metavar="N",
        help="slots verified a cycle (default: all that are drafted, 7)",
    )
    command.add_argument("--context", type=int, default=512, help="tokens before a turn's cycles")
    command.add_argument("--forced", type=int, default=3, help="drafts that count as accepted")
    command.add_argument("--repeats", type=int, default=60, help="rounds of all sides")
    command.add_argument("--inner", type=int, default=8, help="cycles a side in each round")
    command.add_argument(
        "--reference-cycles",
        type=int,
        default=200,
        help="timed cycles of the published package, 0: leave it out",
    )
    _device(command)
    _finish(command, "cycle")


def _throughput(kinds: Any) -> None:
    command = _add(
        kinds,
        "throughput",
        "tokens a second by concurrency and temperature, against plain decoding",
        "Tokens a second of the graph engine on prompts: plain decoding, each drafter with real\n"
        "acceptance, and a random DSpark drafter that is made to accept as many drafts; and the\n"
        "published package, one sequence at a time, if it is installed.",
    )
    target_options(command)
    command.set_defaults(dtype="bfloat16")
    command.add_argument(
        "--drafter",
        action="append",
        default=[],
        help="a folder, a hub id, or zoo:NAME; repeatable (default: zoo:dflash and zoo:dflash2)",
    )
    prompt_options(command)
    command.add_argument("--max-new-tokens", type=int, default=256, help="response tokens at most")
    command.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 8, 16],
        metavar="N",
        help="sequences decoded together; give several times as many prompts",
    )
    command.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T", help="0 is greedy"
    )
    command.add_argument("--repeats", type=int, default=5, help="passes over all prompts")
    command.add_argument(
        "--sampler-batch",
        type=int,
        default=0,
        metavar="N",
        help="also time plain sampling at T = 1 of N sequences against transformers' generate",
    )
    command.add_argument(
        "--no-reference", action="store_true", help="leave the published package out"
    )
    _finish(command, "throughput")


def _kernels(kinds: Any) -> None:
    command = _add(
        kinds,
        "kernels",
        "time every kernel alone against its floor and against torch",
        "Time every kernel alone, cache cold, against the bytes it must move and against torch.",
    )
    command.add_argument(
        "--shapes",
        default=None,
        choices=("full", "tiny"),
        help="default: full with a GPU, tiny without",
    )
    command.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="repeatable (default: all)"
    )
    command.add_argument("--repeats", type=int, default=30, help="rounds of both sides")
    _device(command)
    _finish(command, "kernels")


def _speedup(kinds: Any) -> None:
    command = _add(
        kinds,
        "speedup",
        "net speed-up over plain decoding: acceptance of a recording x measured cycle times",
        "Net speed-up over plain decoding by draft length and concurrency: the acceptance length\n"
        "that a recording replays to, times cycle times that `bench cycle` measured.",
    )
    command.add_argument("record_run", type=Path, metavar="RECORD_RUN", help="a record run")
    command.add_argument(
        "--cycle",
        type=Path,
        required=True,
        metavar="BENCH_RUN",
        help="a run of bench cycle, as of: bench cycle --shapes smollm2-135m --num-draft 1 3 5 7 "
        "--batch 1 8 16",
    )
    _finish(command, "speedup")
