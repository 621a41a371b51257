"""The catalogue: 36 broken decoders, and the harmless ones that a test must let pass."""

from collections.abc import Mapping
from types import MappingProxyType

from dflash2_lab.errors import LabError
from dflash2_lab.losslessness.fault import Fault
from dflash2_lab.losslessness.faults_proposer import PROPOSER_CONTROLS, PROPOSER_FAULTS
from dflash2_lab.losslessness.faults_target import NOISE_FAULTS, TARGET_FAULTS
from dflash2_lab.losslessness.faults_verifier import (
    ACCEPTANCE_FAULTS,
    RESIDUAL_FAULTS,
    VERIFIER_CONTROLS,
)

__all__ = ["CONTROLS", "FAULTS", "Fault", "find_fault"]


def _by_name(*groups: tuple[Fault, ...]) -> Mapping[str, Fault]:
    return MappingProxyType({fault.name: fault for group in groups for fault in group})


FAULTS = _by_name(TARGET_FAULTS, PROPOSER_FAULTS, ACCEPTANCE_FAULTS, RESIDUAL_FAULTS, NOISE_FAULTS)
CONTROLS = _by_name(VERIFIER_CONTROLS, PROPOSER_CONTROLS)


def find_fault(name: str) -> Fault:
    """A fault or control of the catalogue.

    Raises:
        LabError: no such name.
    """
    both = {**FAULTS, **CONTROLS}
    if name not in both:
        raise LabError(f"fault: found {name!r}, expected one of {', '.join(sorted(both))}")
    return both[name]
