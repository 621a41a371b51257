"""Fixtures for all tests."""

import os

import pytest
import torch

# Triton reads this when a kernel is declared: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seeded():
    """Tests that draw random tensors draw the same ones in every run and order."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device():
    """Where kernels run: the GPU if there is one, else the CPU through Triton's interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned(monkeypatch):
    """Memory from torch.empty is full of NaN, or of a large negative number, so that an output a
    kernel forgets to write shows."""
    plain = torch.empty

    def poison(*size, **options):
        tensor = plain(*size, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))

    monkeypatch.setattr(torch, "empty", poison)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 on the CPU; read-only, for tests marked slow.

    Converted once in the user's cache folder, which all test processes share.
    """
    from dflash2_lab.target import load_target

    return load_target("smollm2-135m")
