"""Prompts from templates: a grammar of slots, expanded with a seed.

A grammar file (YAML) has ``slots``, lists of strings by name, and ``kinds``, each with a ``weight``
and ``templates``. In a template or a slot's string, ``{name}`` is drawn from that slot, once for the
whole prompt, ``{name#2}`` is a second draw that differs from the first, ``{2..90}`` is a number of
that range, drawn anew each time, and ``{{`` and ``}}`` are braces.
"""

import random
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import NamedTuple

import yaml

_FIELD = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_MISSES = 1000


class Prompt(NamedTuple):
    """One prompt; a row of a prompts dataset."""

    id: str
    kind: str
    prompt: str


class Kind(NamedTuple):
    """Templates of one kind and their share."""

    weight: float
    templates: tuple[str, ...]


class Grammar(NamedTuple):
    """What prompts are made of."""

    slots: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, Kind]

    @classmethod
    def built_in(cls, name: str) -> "Grammar":
        """The grammar in ``NAME.yaml`` beside this module: ``training`` or ``held_out``."""
        tree = yaml.safe_load(
            resources.files("bastion_batch.training.prompts")
            .joinpath(f"{name}.yaml")
            .read_text(encoding="utf-8")
        )
        return cls(
            {slot: tuple(values) for slot, values in tree["slots"].items()},
            {k: Kind(v["weight"], tuple(v["templates"])) for k, v in tree["kinds"].items()},
        )

    def prompts(self, seed: int) -> Iterator[Prompt]:
        """Distinct prompts, the same for the same seed.

        Ends when the grammar has, as far as can be told, no further one.

        Raises:
            ValueError: a template draws more different values from a slot than it has.
        """
        generator = random.Random(seed)
        names = list(self.kinds)
        weights = [self.kinds[name].weight for name in names]
        seen: set[str] = set()
        num_misses = 0
        while num_misses < _MAX_MISSES:
            kind = generator.choices(names, weights)[0]
            template = generator.choice(self.kinds[kind].templates)
            text = self._expanded(template, generator, {})
            num_misses = num_misses + 1 if text in seen else 0
            if not num_misses:
                seen.add(text)
                yield Prompt(f"{kind}-{len(seen):06d}", kind, text)

    def _expanded(self, text: str, generator: random.Random, drawn: dict[str, str]) -> str:
        def field(match: re.Match[str]) -> str:
            name = match[1]
            if name is None:
                return match[0][0]
            limits = _RANGE.fullmatch(name)
            if limits:
                return str(generator.randint(int(limits[1]), int(limits[2])))
            if name not in drawn:
                drawn[name] = self._drawn(name, generator, drawn)
            return drawn[name]

        return _FIELD.sub(field, text)

    def _drawn(self, name: str, generator: random.Random, drawn: dict[str, str]) -> str:
        slot = name.partition("#")[0]
        taken = {value for other, value in drawn.items() if other.partition("#")[0] == slot}
        values = self.slots[slot]
        for _ in range(_MAX_MISSES):
            value = self._expanded(generator.choice(values), generator, drawn)
            if value not in taken:
                return value
        raise ValueError(
            f"slot {slot!r} has {len(taken)} different values; {name!r} needs one more"
        )
