"""Options that several commands share; like `cli`, it imports nothing heavy."""

import argparse
from collections.abc import Callable
from importlib import import_module

from dflash2_lab.console import seed_number


def output_options(command: argparse.ArgumentParser) -> None:
    """How a result is told."""
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--verbose", action="store_true", help="log details")


def target_options(command: argparse.ArgumentParser) -> None:
    """The target model, its device and precision."""
    command.add_argument(
        "--target",
        default="smollm2-135m",
        help="target model: smollm2-135m (ships as a package), a hub id, a folder, or a .gguf file",
    )
    command.add_argument(
        "--device", default=None, help="cpu or cuda; default: cuda if there is one"
    )
    command.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of target and drafter",
    )


def prompt_options(command: argparse.ArgumentParser) -> None:
    """Which prompts, and how the template renders them."""
    command.add_argument(
        "--prompts",
        default=None,
        metavar="SPEC",
        help='JSON lines file with {"id", "turns": [...]} a line; "default" (the project\'s own, '
        "taken without this option); "
        '"self:N" (N prompts written by the target); or gsm8k, math500, humaneval, mbpp, mt_bench',
    )
    command.add_argument("--limit", type=int, default=None, help="use only the first N prompts")
    chat_options(command)


def chat_options(command: argparse.ArgumentParser) -> None:
    """How the chat template renders a prompt."""
    command.add_argument("--system", default=None, help="system prompt (default: the template's)")
    command.add_argument(
        "--template-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the chat template, for example enable_thinking=false; repeatable",
    )


def sampling_options(command: argparse.ArgumentParser) -> None:
    """How responses are sampled."""
    command.add_argument("--max-new-tokens", type=int, default=96, help="response tokens at most")
    command.add_argument(
        "--max-total", type=int, default=None, help="prompt and response tokens at most"
    )
    command.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    command.add_argument("--top-p", type=float, default=1.0, help="kept mass; 1 is off")
    command.add_argument("--top-k", type=int, default=0, help="0 is off")
    command.add_argument("--samples", type=int, default=1, help="responses a prompt")
    command.add_argument("--seed", type=seed_number, default=0, help="of every random draw")


def run_later(
    name: str, module: str = "commands"
) -> Callable[[argparse.Namespace], dict[str, object]]:
    """The function `name` of a module, which is imported when the command runs."""

    # torch and transformers take seconds to import; --help and bad options should not wait for them
    def run(arguments: argparse.Namespace) -> dict[str, object]:
        return getattr(import_module(f"dflash2_lab.{module}"), name)(arguments)

    return run
