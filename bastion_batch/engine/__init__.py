"""The decode engine: torch, one device, no Ray and no data files. Works in a notebook."""

from bastion_batch.engine.engine import Engine, EngineInfo
from bastion_batch.engine.totals import EngineTotals

__all__ = ["Engine", "EngineInfo", "EngineTotals"]
