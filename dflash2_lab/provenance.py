"""What a run.json says about the machine, the software and the inputs that made the run.

Hashes are of what was used, the weights in memory and the tokens, not only of file names.
"""

import hashlib
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

from dflash2_lab.errors import LabError

PACKAGES = ("dflash2-lab", "torch", "transformers", "triton", "numpy", "scipy", "pandas", "pyarrow")


def environment(device: torch.device) -> dict[str, object]:
    """Date (UTC), command line, git commit (None outside a clone), versions and device of this
    process."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git": git_commit(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def check_device(device: str | torch.device) -> None:
    """Raise LabError for a device that does not exist here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch without CUDA
        raise LabError(f"device {device}: cannot be used here ({error})") from error


def git_commit() -> str | None:
    """Commit of the clone that this package runs from, "-dirty" when files differ from it."""
    folder = Path(__file__).resolve().parent
    call = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        found = subprocess.run(call, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def token_hash(frame: pd.DataFrame) -> str:
    """sha256 over the token ids of all traces, in order."""
    digest = hashlib.sha256()
    for row in frame.itertuples(index=False):
        for ids in (row.prompt_ids, row.response_ids):
            digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return digest.hexdigest()


def weights_hash(drafter: nn.Module) -> str:
    """sha256 over the weights as they are now, which may be no longer those of their file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
