"""The exceptions that callers may catch.

    BastionError
    ├── InputError            what the user gave is wrong, or is refused        exit code 2
    │   ├── JobFileError      the job file, or a ``--set`` override
    │   ├── DataError         an input file or column
    │   ├── ModelError        a target or drafter checkpoint
    │   └── OutputError       the output directory
    ├── JobFailedError        the job cannot go on                              exit code 1
    └── TooManyFailedRows     finished, with more failed rows than the limit    exit code 3

Every class takes one positional message, so that it crosses Ray unchanged. A message names the
thing, its value and the limit. Faults of a single row are values, not exceptions: see
`bastion_batch.records.RowFault`.
"""


class BastionError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class InputError(BastionError, ValueError):
    """Something the user gave is wrong or is refused; no GPU time was spent."""

    exit_code = 2


class JobFileError(InputError):
    """The job file or an override does not describe a job."""


class DataError(InputError):
    """An input is missing, empty, unreadable or lacks a column."""


class ModelError(InputError):
    """A target or drafter cannot be found, loaded or verified as a tree."""


class OutputError(InputError):
    """The output directory cannot be used for this job."""


class JobFailedError(BastionError):
    """The job stopped before every row was answered; running it again continues it."""


class TooManyFailedRows(BastionError):
    """Every row is terminal, and more of them failed than ``limits.max_failed`` allows."""

    exit_code = 3
