"""Fixtures for all tests."""

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    """Tests that draw random tensors draw the same ones in every run and order."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 on the CPU; read-only, for tests marked slow.

    Converted once in the user's cache folder, which all test processes share.
    """
    from dflash2_lab.target import load_target

    return load_target("smollm2-135m")
