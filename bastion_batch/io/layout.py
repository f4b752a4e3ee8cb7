"""Where the files of an output are. A name is relative to the output, with forward slashes."""

import re

DATA = "data"
STEPS = "steps"
PRIVATE = "_bastion"
PLAN = "_bastion/plan.json"
TEMPORARY = "_bastion/tmp"
INVOCATIONS = "_bastion/invocations"
LOGS = "_bastion/logs"
JOURNAL = "_bastion/journal"
PROFILES = "_bastion/profiles"

ATTEMPTS_PER_INVOCATION = 65536
"""Attempts are numbered through all invocations of a job: those of invocation n from n times this."""

_DATA_NAME = re.compile(rf"{DATA}/u(\d{{8,}})\.parquet")
_STEPS_NAME = re.compile(rf"{STEPS}/u\d{{8,}}-a(\d+)\.parquet")
_JOURNAL_NAME = re.compile(rf"{JOURNAL}/.+-(\d+)-\d+\.arrow")


def journal_name(worker: str, attempt: int, number: int) -> str:
    """The name of one of an attempt's journal objects."""
    return f"{JOURNAL}/{worker}-{attempt}-{number}.arrow"


def journal_attempt_of(name: str) -> int | None:
    """The attempt that wrote a name of the journal; None for a name that is not ours."""
    match = _JOURNAL_NAME.fullmatch(name)
    return int(match[1]) if match else None


def data_name(unit: int) -> str:
    """The name whose existence means that the unit is done."""
    return f"{DATA}/u{unit:08d}.parquet"


def steps_name(unit: int, attempt: int) -> str:
    """The name of one attempt's steps file."""
    return f"{STEPS}/u{unit:08d}-a{attempt}.parquet"


def unit_of(name: str) -> int | None:
    """The unit that a name of `data/` commits; None for a name that is not ours."""
    match = _DATA_NAME.fullmatch(name)
    return int(match[1]) if match else None


def attempt_of(name: str) -> int | None:
    """The attempt that wrote a name of `steps/`; None for a name that is not ours."""
    match = _STEPS_NAME.fullmatch(name)
    return int(match[1]) if match else None
