"""How the command line speaks: its help, its one-line errors, and streams that never fail it."""

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn


class Help(argparse.RawDescriptionHelpFormatter):
    """Text as it is written, and the default of an option where it says something."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=100)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        value = action.default
        silent = value is None or value is False or value in ([], argparse.SUPPRESS)
        return text if silent or "default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """Wrong options end in one line, as every other error; the usage is what --help shows."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with code 2."""
        self.exit(2, f"dflash2-lab: {message}; see {self.prog} --help\n")


def seed_number(text: str) -> int:
    """Of --seed: numpy takes no negative one."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number of 0 or more")
    return int(text)


def fail(message: str, code: int = 2) -> int:
    """One line on standard error, whatever a library put into its message; returns the code."""
    print(f"dflash2-lab: {' '.join(message.splitlines())}", file=sys.stderr)
    return code


def mend_streams() -> None:
    """Output that was closed goes nowhere, and what its encoding lacks becomes a question mark."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def drop_output() -> None:
    """What is left in the buffer goes nowhere: the interpreter's own flush would fail again."""
    with contextlib.suppress(OSError):  # of a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_text(word: str) -> bool:
    """Whether an argument is text; bytes that are no UTF-8 come as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in word)


def is_lack_of_memory(error: Exception) -> bool:
    """Whether Python, torch or CUDA ran out of memory."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)
