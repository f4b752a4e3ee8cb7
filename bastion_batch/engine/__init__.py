"""The decode engine: torch, one device, no Ray and no data files. Works in a notebook.

Its names are loaded on first use, so that checkpoints can be resolved without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bastion_batch.engine.engine import Engine, EngineInfo
    from bastion_batch.engine.totals import EngineTotals

__all__ = ["Engine", "EngineInfo", "EngineTotals"]

_HOMES = {"Engine": "engine", "EngineInfo": "engine", "EngineTotals": "totals"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
