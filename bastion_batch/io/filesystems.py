"""File systems of URLs, through fsspec: one path for credentials, for inputs and output alike."""

import re
from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs
from fsspec.spec import AbstractFileSystem

from bastion_batch.errors import InputError

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def open_filesystem(url: str, storage_options: Mapping[str, Any]) -> AbstractFileSystem:
    """The file system of a URL, without caches of listings.

    Errors are retried by our own callers alone (`bastion_batch.io.retries`), where the client
    allows it.

    Raises:
        InputError: the protocol is unknown, its package is not installed, or it refuses the
            options.
    """
    protocol = protocol_of(url)
    options: dict[str, Any] = {"use_listings_cache": False, **storage_options}
    if _EXTRAS.get(protocol) == "s3":
        given = options.get("config_kwargs", {})
        ours = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 32}
        options["config_kwargs"] = {**ours, **given}
    try:
        filesystem, _ = url_to_fs(url, **options)
    except ImportError as error:
        raise missing_package(url, error) from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{without_credentials(url)} cannot be opened: {error}") from None
    if hasattr(filesystem, "retries"):
        filesystem.retries = 1
    return filesystem


def missing_package(url: str, error: ImportError) -> InputError:
    """The error that says how to install what a URL needs."""
    extra = _EXTRAS.get(protocol_of(url))
    command = f"pip install 'bastion_batch[{extra}]'" if extra else str(error)
    return InputError(f"{without_credentials(url)} needs a package: {command}")


def protocol_of(url: str) -> str:
    """What stands before ``://``."""
    return url.partition("://")[0]


def without_credentials(text: str) -> str:
    """The text without the user parts of URLs."""
    return re.sub(r"(?<=://)[^/@\s]+@", "", text)
