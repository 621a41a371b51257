"""The command line: parses arguments, shows progress and results, turns errors into exit codes.

Exit codes: 0 done, 1 a check failed, 2 bad input. With --json one JSON object goes to standard
output; everything else (progress, log, warnings) goes to standard error.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dflash2_lab import console
from dflash2_lab.console import Help, Parser, fail, seed_number
from dflash2_lab.errors import LabError
from dflash2_lab.shared_options import (
    output_options,
    prompt_options,
    run_later,
    sampling_options,
    target_options,
)

EPILOG = """\
examples:
  dflash2-lab reproduce --out runs/reproduce
  dflash2-lab trace --prompts default --limit 24 --max-new-tokens 96 --out runs/traces
  dflash2-lab record --drafter zoo:dflash2 --traces runs/traces --out runs/dflash2
  dflash2-lab replay runs/dflash2 --policy selector --json
  dflash2-lab decode --drafter zoo:dflash2 --prompt "How many days are in a leap year?"
  dflash2-lab record --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 \\
      --prompts gsm8k --limit 32 --max-new-tokens 512 --template-option enable_thinking=false \\
      --device cuda --dtype bfloat16 --out runs/qwen3-4b
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    console.mend_streams()
    for word in words:
        if not console.is_text(word):
            return fail(f"argument {word!r}: found bytes that are no UTF-8, expected text")
    # A group of commands alone asks what there is.
    arguments = parser().parse_args([*words, "--help"] if words in ([], ["bench"]) else words)
    level = logging.DEBUG if arguments.verbose else logging.INFO
    logging.basicConfig(level=level, stream=sys.stderr, format="%(message)s", force=True)
    for noisy in ("httpx", "urllib3", "filelock", "fsspec", "asyncio", "jax"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    code = 0
    try:
        result = arguments.run(arguments)
        code = result.get("code", 0)
        print(json.dumps(result["json"]) if arguments.json else result["text"], flush=True)
    except LabError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        again = "; run the same command again to go on" if arguments.command in RESUMED else ""
        return fail(f"interrupted{again}", 130)
    except BrokenPipeError:  # as in `... | head`
        console.drop_output()
    except OSError as error:  # a full disk below standard output, say
        console.drop_output()
        return fail(str(error))
    except (MemoryError, RuntimeError) as error:
        if not console.is_lack_of_memory(error):
            raise
        return fail(f"not enough memory; take less at a time, or a smaller model ({error})")
    return code


def parser() -> argparse.ArgumentParser:
    """All commands and options."""
    top = Parser(
        prog="dflash2-lab",
        description="Measure where a block-parallel speculative drafter loses acceptance, and what "
        "each fix buys.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (summary, options) in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            formatter_class=Help,
        )
        command.set_defaults(command=name)
        options(command)
        if name != "bench":  # its own commands have them
            output_options(command)
    return top


def _trace_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    prompt_options(command)
    sampling_options(command)
    command.add_argument(
        "--trace-batch-size", type=int, default=32, help="requests decoded together"
    )
    command.add_argument(
        "--import",
        dest="import_file",
        type=Path,
        default=None,
        metavar="FILE",
        help="check traces made elsewhere instead of making them: Parquet or JSON lines with "
        "prompt_id, prompt_ids and response_ids; give the sampling options they were made with",
    )
    command.add_argument("--out", type=Path, required=True, help="run folder; resumed if it exists")
    command.set_defaults(run=run_later("trace"))


def _record_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    command.add_argument(
        "--drafter", required=True, help="a folder, a hub id, or zoo:dflash, zoo:dflash2"
    )
    command.add_argument(
        "--traces",
        type=Path,
        default=None,
        help="a trace run to record on; without it, the prompts are traced first",
    )
    prompt_options(command)
    sampling_options(command)
    command.add_argument(
        "--trace-batch-size", type=int, default=32, help="requests decoded together"
    )
    command.add_argument(
        "--policy",
        action="append",
        default=[],
        help="policy to record, repeatable: top1, sampled, selector, selector_greedy, markov, "
        "markov_greedy (default: all the drafter has)",
    )
    command.add_argument("--anchor-stride", type=int, default=1, help="record every n-th anchor")
    command.add_argument("--batch-size", type=int, default=8, help="traces a target pass and shard")
    command.add_argument("--memory-gb", type=float, default=0.5, help="working memory of one pass")
    command.add_argument(
        "--keep-candidates", action="store_true", help="store candidate ids and scores"
    )
    command.add_argument("--no-attention", action="store_true", help="leave attention shares out")
    command.add_argument(
        "--attention-sample",
        type=int,
        default=0,
        metavar="N",
        help="keep what each slot attends to, key by key, at N anchors a trace",
    )
    command.add_argument("--out", type=Path, required=True, help="run folder; resumed if it exists")
    command.set_defaults(run=run_later("record"))


def _replay_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("folder", type=Path, help="a record run")
    command.add_argument(
        "--policy", action="append", default=[], help="repeatable; also oracle@k (default: all)"
    )
    command.add_argument("--num-draft", type=int, default=None, help="a shorter verify window")
    command.add_argument(
        "--acceptance", default="token", choices=("token", "block"), help="verification rule"
    )
    command.set_defaults(run=run_later("replay"))


def _decode_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    command.add_argument(
        "--drafter",
        required=True,
        help="a folder, a hub id, zoo:dflash, zoo:dflash2, or none (token by token)",
    )
    prompt_options(command)
    command.add_argument("--prompt", default=None, metavar="TEXT", help="one prompt, as text")
    sampling_options(command)
    command.add_argument(
        "--policy",
        default=None,
        help="top1, sampled, selector, selector_greedy, markov or markov_greedy (default: top1 for "
        "DFlash, selector for DFlash 2, markov for DSpark)",
    )
    command.add_argument(
        "--num-draft", type=int, default=None, help="slots verified a step (default: all drafted)"
    )
    command.add_argument(
        "--engine",
        default="eager",
        choices=("eager", "graph"),
        help="eager: any target, one row at a time; graph: CUDA graphs, --batch-size rows",
    )
    command.add_argument(
        "--batch-size", type=int, default=8, help="rows decoded together by the graph engine"
    )
    command.add_argument(
        "--acceptance", default="token", choices=("token", "block"), help="verification rule"
    )
    command.add_argument(
        "--out", type=Path, default=None, help="run folder for the steps table (default: none)"
    )
    command.set_defaults(run=run_later("decode", "decode_commands"))


def _verify_replay_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    command.add_argument(
        "--drafter", required=True, help="a folder, a hub id, or zoo:dflash, zoo:dflash2"
    )
    prompt_options(command)
    sampling_options(command)
    command.set_defaults(samples=8)
    command.add_argument("--policy", default=None, help="default: the drafter's own")
    command.add_argument(
        "--num-draft", type=int, default=None, help="slots verified a step (default: all drafted)"
    )
    command.add_argument("--batch-size", type=int, default=8, help="rows of the graph engine")
    command.add_argument(
        "--acceptance", default="token", choices=("token", "block"), help="verification rule"
    )
    command.add_argument(
        "--out", type=Path, default=None, help="run folder for verify.json (default: none)"
    )
    command.set_defaults(run=run_later("verify_replay", "verify_commands"))


def _verify_options(command: argparse.ArgumentParser) -> None:
    from dflash2_lab.losslessness.options import add_verify_options

    add_verify_options(command)


def _train_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    command.add_argument(
        "--kind", default="dflash2", choices=("dflash", "dflash2"), help="of drafter"
    )
    command.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        help="a trace run, or a Parquet file with prompt_ids and response_ids; repeatable",
    )
    command.add_argument(
        "--mask-token-id", type=int, default=None, help="an id the text never uses"
    )
    command.add_argument("--num-layers", type=int, default=5, help="of the drafter")
    command.add_argument("--intermediate-size", type=int, default=None, help="default: target's")
    command.add_argument("--block-size", type=int, default=8, help="the anchor counted")
    command.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    command.add_argument("--batch-size", type=int, default=64, help="sequences a step")
    command.add_argument("--num-anchors", type=int, default=64, help="blocks a sequence")
    command.add_argument("--max-length", type=int, default=512, help="tokens a sequence")
    command.add_argument("--learning-rate", type=float, default=1e-3, help="at its peak")
    command.add_argument(
        "--soft-labels", type=float, default=0.5, help="weight of the target's law"
    )
    command.add_argument("--decay", type=float, default=4.0, help="loss decay over slots")
    command.add_argument(
        "--held-out", type=int, default=64, help="sequences a source to validate on"
    )
    command.add_argument("--report-every", type=int, default=200, help="steps")
    command.add_argument("--checkpoint-every", type=int, default=1000, help="steps")
    command.add_argument("--seed", type=seed_number, default=0, help="of every random draw")
    command.add_argument("--out", type=Path, required=True, help="run folder; resumed if it exists")
    command.set_defaults(run=run_later("train"))


def _inspect_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("checkpoint", help="a folder, a hub id, or zoo:NAME")
    command.add_argument("--target", default=None, help="also check that it fits this target")
    command.set_defaults(run=run_later("inspect"))


def _figures_options(command: argparse.ArgumentParser) -> None:
    from dflash2_lab.figure_options import add_figures_options

    add_figures_options(command)
    command.set_defaults(run=run_later("figures", "figure_commands"))


def _page_options(command: argparse.ArgumentParser) -> None:
    from dflash2_lab.report_options import OPTIONS

    name = command.get_default("command")
    OPTIONS[name](command)
    command.set_defaults(run=run_later(name, "report_commands"))


def _reproduce_options(command: argparse.ArgumentParser) -> None:
    target_options(command)
    command.add_argument("--limit", type=int, default=24, help="prompts")
    command.add_argument("--max-new-tokens", type=int, default=96)
    command.add_argument("--drafter", action="append", default=[], help="default: both of the zoo")
    command.add_argument("--out", type=Path, default=Path("runs/reproduce"), help="run folder")
    command.set_defaults(run=run_later("reproduce"))


def _bench_options(command: argparse.ArgumentParser) -> None:
    from dflash2_lab.bench.options import add_benchmarks

    add_benchmarks(command)


RESUMED = ("trace", "record", "train", "reproduce")  # commands that go on where they stopped
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "trace": ("write the target's own continuations of prompts", _trace_options),
    "record": ("record what a drafter does at every anchor of traces", _record_options),
    "replay": ("acceptance of each policy from a recording, without a model", _replay_options),
    "decode": (
        "answer prompts by speculative decoding, and show what was accepted",
        _decode_options,
    ),
    "verify-replay": (
        "check that decoding and replaying a recording tell the same, greedy or sampled",
        _verify_replay_options,
    ),
    "verify": (
        "test our decode, or samples of any engine, for the target's law",
        _verify_options,
    ),
    "train": ("train a DFlash or DFlash 2 drafter on traces", _train_options),
    "inspect": ("show a drafter checkpoint and every problem in it", _inspect_options),
    "figures": (
        "draw the figures of record runs, or redraw and verify the figures of record",
        _figures_options,
    ),
    "report": ("write one HTML page on a run, with figures and provenance", _page_options),
    "compare": ("hold two drafters against each other on the same prompts", _page_options),
    "reproduce": (
        "the main job: trace, record, replay and draw the zoo drafters",
        _reproduce_options,
    ),
    "bench": ("time cycles, kernels, recording and tokens a second", _bench_options),
}
