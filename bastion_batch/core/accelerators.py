"""What accelerators are called: by people, by Ray, by clouds, and by the devices themselves.

One card has many names: "RTX A6000" in a job file, "RTX-A6000" on a node that a new Ray labels,
"RTX" on one that a Ray of before 2026 does, "NVIDIA RTX A6000" where CUDA is asked. All are split
into the words that tell one card from another; brands, forms and connectors do not.

A label may say less than is selected: Ray calls every A100 "A100". Such a node is taken, since it
may be the right one; what the device is, its worker finds out.
"""

import difflib
import re
from collections.abc import Iterable
from typing import NamedTuple

from bastion_batch.errors import JobFileError


class Accelerator(NamedTuple):
    """A kind of card, told by the words of its name."""

    name: str
    words: frozenset[str]
    ray_name: str
    """As Ray labels a node that has it."""

    def includes(self, other: "Accelerator") -> bool:
        """Whether every `other` is one of these: an A100-80G is an A100."""
        return self.words <= other.words


_NOISE = """
    NVIDIA AMD INSTINCT TESLA GEFORCE QUADRO RTX GPU BLACKWELL WORKSTATION SERVER EDITION GENERATION
    MAX Q SXM SXM2 SXM3 SXM4 SXM5 SXM6 PCIE PCI NVL OAM HF HBM2 HBM2E HBM3 HBM3E
"""
"""Words that tell no card from another."""

_ANY_RTX = "RTX"
"""All that Rays of before 2026 say of a card of that line."""


def _accelerator(name: str, ray_name: str | None = None) -> Accelerator:
    return Accelerator(name, _words(name), ray_name or name)


def _words(name: str) -> frozenset[str]:
    """The telling words of a name; sizes as `80GB`, however they are written; a part's, not."""
    spaced = re.sub(r"[^A-Z0-9]+", " ", name.upper().partition(" MIG ")[0])
    words = {re.sub(r"^(\d+)G(I?B)?$", r"\1GB", word) for word in spaced.split()}
    return frozenset(words.difference(_NOISE.split()))


_SAME_TO_RAY = """
    B300 B200 GB300 GB200 GH200 H200 H100 H20 A100 A100-40G A100-80G A800 H800
    L40S L40 L4 A40 A30 A16 A10 A10G A2 V100 T4 P100 P4 K80
    RTX-A6000 RTX-A5000 RTX-A4000 RTX-PRO-6000 RTX-PRO-5000 RTX-PRO-4500
"""

ACCELERATORS = (
    *(_accelerator(name) for name in _SAME_TO_RAY.split()),
    *(_accelerator(f"RTX-{size}-Ada", f"RTX-{size}") for size in (6000, 5000, 4000)),
    *(
        _accelerator(f"RTX-{model}", f"GeForce-RTX-{model}")
        for model in (5090, 5080, 4090, 4080, 3090, 3080)
    ),
    _accelerator("MI300X", "AMD-Instinct-MI300X-OAM"),
    _accelerator("MI325X", "AMD-Instinct-MI325X-OAM"),
    _accelerator("MI350X", "AMD-Instinct-MI350X-OAM"),
    _accelerator("MI355X", "AMD-Instinct-MI355X-OAM"),
)
"""Every accelerator that a job file may select by name; others are selected by label."""


def accelerator(name: str) -> Accelerator:
    """The accelerator that a person means.

    Raises:
        JobFileError: there is none of this name; it names the nearest.
    """
    found = find_accelerator(name)
    if found is None:
        raise JobFileError(
            f"accelerator {name!r} is not known; {_nearest(name)}; any other is selected by `label`"
        )
    return found


def find_accelerator(name: str) -> Accelerator | None:
    """The most exact accelerator that a name can be said to mean: a person's, Ray's or CUDA's."""
    words = _words(name)
    candidates = [a for a in ACCELERATORS if a.words <= words and _only_size(words - a.words)]
    return max(candidates, key=lambda a: len(a.words), default=None)


def may_be(selected: Accelerator, label: str) -> bool:
    """Whether a node that is labelled so may have the selected accelerator."""
    if label.upper() == _ANY_RTX:
        return _is_rtx(selected)
    if label in (selected.name, selected.ray_name):
        return True
    found = find_accelerator(label)
    return found is not None and (selected.includes(found) or found.includes(selected))


def labels_of(selected: Accelerator) -> list[str]:
    """What Ray's label may be on a node that has it, the likeliest first."""
    related = [a for a in ACCELERATORS if a.includes(selected) or selected.includes(a)]
    names = [selected.ray_name, selected.name, *(a.ray_name for a in related)]
    return list(dict.fromkeys([*names, *([_ANY_RTX] if _is_rtx(selected) else [])]))


def is_one_of(selected: Iterable[Accelerator], device: str) -> bool:
    """Whether a device, by the name that it gives itself, is one of the selected ones."""
    found = find_accelerator(device)
    return found is not None and any(one.includes(found) for one in selected)


def _only_size(words: frozenset[str]) -> bool:
    """Whether these words are an amount of memory."""
    return all(re.fullmatch(r"\d+GB", word) for word in words)


def _is_rtx(selected: Accelerator) -> bool:
    return selected.ray_name.startswith(f"{_ANY_RTX}-")


def _nearest(name: str) -> str:
    known = {a.name.upper(): a.name for a in ACCELERATORS}
    known |= {a.name.upper().removeprefix("RTX-"): a.name for a in ACCELERATORS}
    text = re.sub(r"[\s_]+", "-", name.strip().upper())
    near = [known[n] for n in difflib.get_close_matches(text, known, n=3, cutoff=0.5)]
    if near:
        return f"did you mean {' or '.join(dict.fromkeys(near))}?"
    return f"known: {', '.join(a.name for a in ACCELERATORS)}"
