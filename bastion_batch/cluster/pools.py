"""Pools: workers that are alike, and the machines that they are for.

A pool selects nodes by what Ray knows of them: labels, among them `ray.io/accelerator-type`, and
resources, among them the older `accelerator_type:X`. A negated label expression selects nodes that
have the label with another value; Ray's own would take nodes without it too.

What a label says is only where a worker is sent. What it found there is what counts, and where
that is not what was selected, `mismatch` says so.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bastion_batch.config import PoolConfig, WorkersConfig
from bastion_batch.core.accelerators import (
    Accelerator,
    accelerator,
    is_one_of,
    labels_of,
    may_be,
)

ACCELERATOR_LABEL = "ray.io/accelerator-type"
ACCELERATOR_RESOURCE = "accelerator_type:"
NODE_ID_LABEL = "ray.io/node-id"


class Node(NamedTuple):
    """A machine of the cluster."""

    node_id: str
    host: str
    num_cpus: float
    num_gpus: int
    labels: Mapping[str, str] = {}
    resources: Mapping[str, float] = {}

    @property
    def accelerators(self) -> tuple[str, ...]:
        """What Ray calls its accelerators; empty where it does not know."""
        label = self.labels.get(ACCELERATOR_LABEL)
        older = [
            name.removeprefix(ACCELERATOR_RESOURCE)
            for name in self.resources
            if name.startswith(ACCELERATOR_RESOURCE)
        ]
        return tuple(dict.fromkeys([*([label] if label else []), *older]))

    def __str__(self) -> str:
        """What it offers, in a few words."""
        kinds = f" ({', '.join(self.accelerators)})" if self.accelerators else ""
        return f"{self.host} {self.num_cpus:g} CPUs {self.num_gpus} GPUs{kinds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """A pool of a job, its accelerators known."""

    name: str
    config: PoolConfig
    accelerators: tuple[Accelerator, ...] = ()
    _rules: Mapping[str, "_Rule"] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, name: str, config: PoolConfig) -> "Pool":
        """Understand what is selected.

        Raises:
            JobFileError: an accelerator has no known name.
        """
        accelerators = tuple(accelerator(name) for name in config.select.accelerator)
        rules = {key: _Rule.parse(text) for key, text in config.select.label.items()}
        return cls(name=name, config=config, accelerators=accelerators, _rules=rules)

    def selects(self, node: Node) -> bool:
        """Whether this pool's workers may run there."""
        return (
            (not self.accelerators or self._has_accelerator(node))
            and all(rule.accepts(node.labels.get(key)) for key, rule in self._rules.items())
            and all(
                node.resources.get(name, 0.0) >= amount
                for name, amount in self.config.select.resource.items()
            )
            and (self.config.device != "cuda" or node.num_gpus > 0)
        )

    def places(self, node: Node) -> int:
        """Workers for which its resources of other names suffice."""
        amounts = self.config.select.resource.items()
        return min((int(node.resources.get(n, 0.0) / a + 1e-9) for n, a in amounts), default=10**6)

    def device(self, nodes: Collection[Node]) -> str | None:
        """``cuda`` or ``cpu``, on these nodes that it selects; None if only a node can tell.

        A pool that follows the machines begins on CPUs where there is none yet: it gets workers
        for the GPUs that come.
        """
        if self.config.device != "auto":
            return self.config.device
        if self.accelerators or any(n.num_gpus for n in nodes):
            return "cuda"
        return "cpu" if nodes or self.config.count == "auto" else None

    def label_selector(self, nodes: Collection[Node]) -> dict[str, str]:
        """How Ray is told where a worker without a node may go, now or when a node appears.

        `nodes` are all that are selected now. They alone are named with a negated rule, which Ray
        understands otherwise, and where they have resources of an accelerator instead of labels;
        else labels that they spell in their own way are named besides the usual ones.
        """
        selector = dict(self.config.select.label)
        by_accelerator = bool(self.accelerators) and ACCELERATOR_LABEL not in selector
        spelt = [n.labels[ACCELERATOR_LABEL] for n in nodes if ACCELERATOR_LABEL in n.labels]
        if not self.may_wait or (by_accelerator and nodes and not spelt):
            return {NODE_ID_LABEL: f"in({','.join(sorted(n.node_id for n in nodes))})"}
        if by_accelerator:
            usual = [label for a in self.accelerators for label in labels_of(a)]
            selector[ACCELERATOR_LABEL] = f"in({','.join(dict.fromkeys([*usual, *spelt]))})"
        return selector

    @property
    def may_wait(self) -> bool:
        """Whether Ray can be asked for a worker that no node of today takes."""
        return not any(rule.negated for rule in self._rules.values())

    def mismatch(self, device: str) -> str | None:
        """What is wrong with the device that a worker found, or None."""
        if not self.accelerators or is_one_of(self.accelerators, device):
            return None
        return f"pool {self.name} selects {self._accelerator_names()}; the device is {device}"

    def note_on(self, device: str) -> dict[str, Any]:
        """What a worker that found this device says of its pool when it registers."""
        return {
            "pool": self.name,
            "price_per_hour": self.config.price_per_hour,
            "mismatch": self.mismatch(device),
        }

    def describe(self) -> str:
        """What it asks for, in a few words."""
        select = self.config.select
        each = "one per machine" if self.config.device == "cpu" else "one per GPU"
        count = each if self.config.count == "auto" else f"{self.config.count} workers"
        parts = [
            f"accelerator {self._accelerator_names()}" if self.accelerators else "",
            *(f"label {key}: {text}" for key, text in select.label.items()),
            *(f"resource {name}: {amount:g}" for name, amount in select.resource.items()),
        ]
        selected = ", ".join(part for part in parts if part) or "every machine"
        device = "" if self.config.device == "auto" else f", device {self.config.device}"
        return f"pool {self.name} ({selected}{device}; {count})"

    def _accelerator_names(self) -> str:
        return " or ".join(a.name for a in self.accelerators)

    def _has_accelerator(self, node: Node) -> bool:
        return node.num_gpus > 0 and any(
            may_be(one, label) for one in self.accelerators for label in node.accelerators
        )


def pools_of(workers: WorkersConfig) -> tuple[Pool, ...]:
    """The pools of a job, each with a name of its own.

    Raises:
        JobFileError: an accelerator has no known name.
    """
    configs = workers.all_pools()
    taken = {config.name for config in configs if config.name is not None}
    pools = []
    for number, config in enumerate(configs):
        name = config.name or _free_name(config, number, taken)
        taken.add(name)
        pools.append(Pool.of(name, config))
    return tuple(pools)


def _free_name(config: PoolConfig, number: int, taken: Collection[str | None]) -> str:
    stem = re.sub(r"\s+", "-", "+".join(config.select.accelerator).lower()) or "workers"
    numbered = (f"{stem}-{n}" for n in itertools.count(number))
    return next(name for name in itertools.chain([stem], numbered) if name not in taken)


class _Rule(NamedTuple):
    """A label expression: `value`, `in(a,b)`, `!value`, `!in(a,b)`."""

    values: frozenset[str]
    negated: bool

    @classmethod
    def parse(cls, text: str) -> "_Rule":
        """Understand an expression that the job file's checks have passed."""
        inner = re.fullmatch(r"!?in\((.*)\)", text)
        values = inner[1].split(",") if inner else [text.removeprefix("!")]
        return cls(frozenset(value.strip() for value in values), text.startswith("!"))

    def accepts(self, value: str | None) -> bool:
        return value is not None and (value in self.values) != self.negated
