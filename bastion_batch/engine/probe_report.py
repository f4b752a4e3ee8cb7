"""What a probe found, and where it is kept: one file for a pair of models, beside the profiles.

The first to probe a pair writes the file, whole or not at all; it is never replaced, so that all
workers on a machine hold with one verdict. Nothing here imports torch.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from bastion_batch import __version__
from bastion_batch.engine.drafters.description import DrafterDescription
from bastion_batch.engine.keyed_files import file_of, profiles_dir, put, put_if_absent

PROBE_VERSION = 1
"""Of the prompts, the readings and the rule: verdicts of another version are not read."""

PREFIX = "probe-"

logger = logging.getLogger(__name__)


class ReadingReport(NamedTuple):
    """Another reading against the checkpoint's own."""

    factor: str
    value: Any
    """What the factor would be: taps, the first slot, or how a block attends."""
    difference: float
    """In nats of log q of the target's token; positive where the other reading is better."""
    standard_error: float
    agreement: float
    """Share of anchors at which its first prediction is the target's token."""
    is_better: bool
    """Beyond doubt."""


class ProbeReport(NamedTuple):
    """What a probe found; JSON-able by `to_dict`."""

    num_texts: int
    num_anchors: int
    log_q: float | None = None
    """Mean of the target's tokens in the first slots, under the checkpoint's own reading."""
    agreements: tuple[float, ...] = ()
    """Share of anchors at which each of these slots names the target's token."""
    readings: tuple[ReadingReport, ...] = ()
    fault: str | None = None
    """Why the drafter is refused, whatever its path."""
    warning: str | None = None
    """What is worth saying otherwise."""
    seconds: float = 0.0

    @classmethod
    def of_nothing(cls, warning: str, num_texts: int) -> Self:
        """A probe that could not tell."""
        return cls(num_texts=num_texts, num_anchors=0, warning=warning)

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Self:
        """From what `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        readings = tuple(ReadingReport(**reading) for reading in content["readings"])
        agreements = tuple(content["agreements"])
        fields: dict[str, Any] = {**content, "readings": readings, "agreements": agreements}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**self._asdict(), "readings": [reading._asdict() for reading in self.readings]}

    @property
    def verdict(self) -> str:
        """In one line, for people."""
        if self.fault is not None:
            return f"refused: {self.fault}"
        agreement = f", next token named in {self.agreements[0]:.2f}" if self.agreements else ""
        found = f"passed on {self.num_anchors:,} anchors{agreement}"
        return f"{found}; {self.warning}" if self.warning else found


ProbeKey = Mapping[str, Any]
"""What a verdict depends on; JSON values."""


def probe_key(target_digest: str, drafter_digest: str, drafter: DrafterDescription) -> ProbeKey:
    """The key of a pair of models: the fingerprints of their files, and how the drafter is read.

    A reader that makes something else of the same files is not judged by the verdict on another.
    """
    return {
        "probe": PROBE_VERSION,
        "version": __version__,
        "target": target_digest,
        "drafter": drafter_digest,
        "taps": list(drafter.taps),
        "first_prediction_slot": drafter.first_prediction_slot,
        "layers": [list(layer) for layer in drafter.layers],
    }


def lock_of(key: ProbeKey, directory: Path | None = None) -> Path:
    """The file that is locked while a pair is probed."""
    return file_of(directory or profiles_dir(), key, PREFIX).with_suffix(".lock")


def save_report(key: ProbeKey, report: ProbeReport, directory: Path | None = None) -> ProbeReport:
    """Keep the verdict on a pair, and return the one that holds: an earlier one if it is there.

    A failure to write is logged.
    """
    path = file_of(directory or profiles_dir(), key, PREFIX)
    text = json.dumps({"key": dict(key), "report": report.to_dict()}) + "\n"
    try:
        if put_if_absent(path, text):
            return report
        earlier = load_report(key, directory)
        if earlier is not None:
            return earlier
        put(path, text)
    except OSError as error:
        logger.warning("the probe's report cannot be kept: %s", error)
    return report


def load_report(key: ProbeKey, directory: Path | None = None) -> ProbeReport | None:
    """The verdict on a pair; None if there is none, or (logged) none that can be read."""
    path = file_of(directory or profiles_dir(), key, PREFIX)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            raise ValueError("its key is another one")
        report = ProbeReport.of_dict(content["report"])
        path.touch()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("probe report %s is ignored: %r", path, error)
        return None
    return report
