"""One dtype for all workers of a job.

What ``model.dtype: auto`` means depends on the device, and devices differ; a job's output is in
one dtype all the same. So the first to know says what it is, in the output, for all that follow:
the driver where GPUs are used, or else the worker that is there first. A later invocation on other
machines goes on with it. Only a job with ``model.allow_mixed_dtype`` leaves it to each worker.
"""

from collections.abc import Callable

from bastion_batch.config import JobConfig
from bastion_batch.io.store import PRIVATE, Store

DTYPE_FILE = f"{PRIVATE}/dtype"


def settle_dtype(job: JobConfig, store: Store, choose: Callable[[], str]) -> JobConfig:
    """The job with the dtype that its workers share; `choose` says which, if nobody has yet."""
    if job.model.dtype != "auto" or job.model.allow_mixed_dtype:
        return job
    settled = _read(store)
    if settled is None:
        store.put_if_absent(DTYPE_FILE, choose().encode())
        settled = _read(store)
    return job.model_copy(update={"model": job.model.model_copy(update={"dtype": settled})})


def _read(store: Store) -> str | None:
    try:
        return store.read(DTYPE_FILE).decode()
    except FileNotFoundError:
        return None
