"""What a run.json says about the machine and the software that made the run."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = ("dflash2-lab", "torch", "transformers", "triton", "numpy", "pandas", "pyarrow")


def environment(device: torch.device) -> dict[str, object]:
    """Command line, git commit (None outside a clone), versions and device of this process."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def git_commit() -> str | None:
    """Commit of the clone that this package runs from, "-dirty" when files differ from it."""
    folder = Path(__file__).resolve().parent
    call = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        found = subprocess.run(call, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
