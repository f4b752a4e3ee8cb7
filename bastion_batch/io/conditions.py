"""Writing under a condition, in the dialect of each kind of object store.

Every class makes one request per call and turns its client's own errors into `OSError`, so that
one rule tells what may pass (`bastion_batch.io.retries.may_pass`).
"""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, Protocol

from fsspec.spec import AbstractFileSystem

from bastion_batch.io.filesystems import protocol_of

NOT_MET = 412
"""HTTP status: the condition of a write does not hold."""


class Conditions(Protocol):
    """Conditional writes to paths of one file system. False: the condition does not hold."""

    conditional: bool
    """Whether creating a path is atomic, as far as is known by now."""

    def create(self, path: str, payload: bytes) -> bool:
        """Write a path that does not exist."""
        ...

    def replace(self, path: str, payload: bytes, version: str) -> bool:
        """Replace a path that has this version."""
        ...

    def version(self, path: str) -> str | None:
        """The path's version now; None where it does not exist."""
        ...

    def errors(self) -> Any:  # noqa: ANN401 - a context manager
        """A context in which the client's errors become `OSError`."""
        ...


class Overwriting:
    """Any fsspec file system: looks first, then overwrites. Between the two another may write."""

    conditional = False

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._fs: Any = filesystem

    def create(self, path: str, payload: bytes) -> bool:
        """Write a path that does not seem to exist."""
        if self._fs.exists(path):
            return False
        self._fs.pipe_file(path, payload)
        return True

    def replace(self, path: str, payload: bytes, version: str) -> bool:
        """Replace a path whose content seems to be that of this version."""
        if self.version(path) != version:
            return False
        self._fs.pipe_file(path, payload)
        return True

    def version(self, path: str) -> str | None:
        """A digest of the content."""
        try:
            return blake2b(self._fs.cat_file(path), digest_size=16).hexdigest()
        except FileNotFoundError:
            return None

    @contextmanager
    def errors(self) -> Generator[None]:
        """Only `OSError` is known of these."""
        yield


class S3Conditions:
    """``If-None-Match: *`` and ``If-Match: ETag``, through s3fs.

    A server that refuses the first is overwritten from then on; one that ignores it is found out
    by `probe_conditional`.
    """

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._fs: Any = filesystem
        self.conditional = True

    def create(self, path: str, payload: bytes) -> bool:
        """Create a key, in one request or, when it is large, in parts."""
        if not self.conditional:
            return Overwriting(self._fs).create(path, payload)
        try:
            self._fs.pipe_file(path, payload, mode="create")
        except FileNotFoundError as error:
            if error_code(error) != "NoSuchUpload":
                raise
            # The last request of an upload in parts failed, and so did giving it up: it was done.
            raise OSError(errno.EIO, str(error)) from error
        except OSError as error:
            if http_status(error) == NOT_MET:
                return False
            if error.errno != errno.ENOSYS:
                raise
            self.conditional = False
            return self.create(path, payload)
        return True

    def replace(self, path: str, payload: bytes, version: str) -> bool:
        """Replace a key whose ETag is this one, in one request."""
        bucket, key, _ = self._fs.split_path(path)
        try:
            self._fs.call_s3("put_object", Bucket=bucket, Key=key, Body=payload, IfMatch=version)
        except FileNotFoundError:
            return False
        except OSError as error:
            if http_status(error) == NOT_MET:
                return False
            raise
        return True

    def version(self, path: str) -> str | None:
        """The ETag."""
        try:
            return self._fs.info(path, refresh=True)["ETag"]
        except FileNotFoundError:
            return None

    @contextmanager
    def errors(self) -> Generator[None]:
        """The client's own errors: no connection, no answer, no credentials."""
        from botocore import exceptions
        from botocore.parsers import ResponseParserError

        refused = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
        failed = (exceptions.ConnectionError, exceptions.HTTPClientError, ResponseParserError)
        try:
            yield
        except refused as error:
            raise PermissionError(errno.EACCES, str(error)) from error
        except failed as error:
            raise OSError(errno.EIO, str(error)) from error


class GcsConditions:
    """``ifGenerationMatch`` of the JSON interface, through gcsfs; generation 0 means absent."""

    conditional = True

    def __init__(self, filesystem: AbstractFileSystem) -> None:
        self._fs: Any = filesystem

    def create(self, path: str, payload: bytes) -> bool:
        """Create an object."""
        return self._upload(path, payload, "0")

    def replace(self, path: str, payload: bytes, version: str) -> bool:
        """Replace an object of this generation."""
        return self._upload(path, payload, version)

    def version(self, path: str) -> str | None:
        """The generation."""
        try:
            return str(self._fs.info(path)["generation"])
        except FileNotFoundError:
            return None

    def _upload(self, path: str, payload: bytes, generation: str) -> bool:
        bucket, key, _ = self._fs.split_path(path)
        try:
            self._fs.call(
                "POST",
                f"{self._fs._location}/upload/storage/v1/b/{bucket}/o",
                uploadType="media",
                name=key,
                ifGenerationMatch=generation,
                headers={"Content-Type": "application/octet-stream"},
                data=payload,
            )
        except (FileExistsError, FileNotFoundError):
            return False
        return True

    @contextmanager
    def errors(self) -> Generator[None]:
        """The client's own errors, by their HTTP status where they have one."""
        from aiohttp import ClientError
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except GoogleAuthError as error:
            number = errno.EIO if error.retryable else errno.EACCES
            raise OSError(number, str(error)) from error
        except HttpError as error:
            raise OSError(_number_of_status(int(error.code or 500)), str(error)) from error
        except ClientError as error:
            raise OSError(errno.EIO, str(error)) from error
        except OSError as error:
            if str(error).startswith("Forbidden"):
                raise PermissionError(errno.EACCES, str(error)) from error
            raise


def conditions_of(url: str, filesystem: AbstractFileSystem) -> Conditions:
    """How the file system of a URL writes under a condition, and what its errors are."""
    kinds = {"s3": S3Conditions, "s3a": S3Conditions, "gs": GcsConditions, "gcs": GcsConditions}
    return kinds.get(protocol_of(url), Overwriting)(filesystem)


def http_status(error: OSError) -> int | None:
    """The HTTP status behind an error of s3fs."""
    return _response(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def error_code(error: OSError) -> str | None:
    """The server's name of an error of s3fs."""
    return _response(error).get("Error", {}).get("Code")


def _response(error: OSError) -> dict[str, Any]:
    return getattr(error.__cause__, "response", None) or {}


def _number_of_status(status: int) -> int:
    """An error number that says whether an HTTP status may pass."""
    if status in (401, 403):
        return errno.EACCES
    return errno.EAGAIN if status in (408, 409, 429) or status >= 500 else errno.EINVAL
