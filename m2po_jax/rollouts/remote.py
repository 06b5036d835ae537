"""Object stores behind a network: opened once with a look at what is wrong, asked again where they do not answer."""

import contextlib
import logging
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import from_url

from m2po_jax.config import UserError

PATIENCE_S = 300.0
"""How long a store may stay away before that is an error."""
_SAY_AFTER_S = 10.0
_LONGEST_PAUSE_S = 5.0
_REFUSALS = (AlreadyExistsError, FileNotFoundError, NotSupportedError, PreconditionError)
_LOG = logging.getLogger(__name__)
_CREDENTIALS = "run gcloud auth application-default login, or give this machine a service account"
_KEY_FILE = re.compile(r"credential|service account|private key", re.IGNORECASE)
_STATUS = re.compile(r"status code: (\d{3})")

T = TypeVar("T")


def open_remote(url: str) -> Any:
    """The object store behind a URL such as `gs://bucket/prefix`, with the credentials of the machine.

    Raises UserError, within seconds, where there is no such bucket, no permission, or no credentials.
    """
    try:
        probe, client = _client(url, max_retries=2, patience_s=15.0), _client(url, max_retries=10, patience_s=60.0)
    except (BaseError, ValueError, OSError) as error:
        if _KEY_FILE.search(str(error)):
            raise UserError(f"{url}: {_line(error)}: {_CREDENTIALS}") from error
        raise UserError(f"{url} is no store ({_line(error)}): use a directory or gs://bucket/prefix") from error
    with contextlib.suppress(BaseError):  # one that is away is asked again by whoever needs it
        _require_access(probe, url)
    return client


def _require_access(probe: Any, url: str) -> None:
    try:
        list(obstore.list(probe, "config.json", chunk_size=1))
    except BaseError as error:
        if (reason := _refusal(error, url)) is not None:
            raise UserError(reason) from error
        raise


def patiently(operation: Callable[[], T], what: str) -> T:
    """The result of an operation on a remote store, tried again while the store is away, for up to PATIENCE_S.

    The operation must bear being done twice, as an answer may be lost. Raises what the store refuses for good as it is
    (FileNotFoundError, AlreadyExistsError, PreconditionError), UserError for lost permission, and the last error where
    patience ends.
    """
    since, pause_s, told = time.monotonic(), 0.1, False
    while True:
        try:
            return operation()
        except _REFUSALS:
            raise
        except (BaseError, OSError) as error:
            if (reason := _refusal(error, what)) is not None:
                raise UserError(reason) from error
            waited_s = time.monotonic() - since
            if waited_s > PATIENCE_S:
                raise UserError(
                    f"{what} does not answer since {waited_s:.0f} s ({_line(error)}):"
                    " run the same command again when it does"
                ) from error
            if waited_s > _SAY_AFTER_S and not told:
                _LOG.warning("%s does not answer (%s): trying for %d s", what, _line(error), PATIENCE_S)
                told = True
            time.sleep(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _client(url: str, max_retries: int, patience_s: float) -> Any:
    # Emulators are reached without TLS, at an address from the variable that Google's own libraries read.
    # An answer may take long, as objects may be large; silence in it may not.
    options: Any = {"timeout": "600s", "read_timeout": "20s", "connect_timeout": "5s"}
    if "STORAGE_EMULATOR_HOST" in os.environ:
        options["allow_http"] = True
    retries: Any = {"max_retries": max_retries, "retry_timeout": timedelta(seconds=patience_s)}
    return from_url(url, client_options=options, retry_config=retries)


def _refusal(error: BaseException, what: str) -> str | None:
    """What the user is to mend, where trying again is in vain; None where it may help."""
    text = str(error)
    if "token request" in text or isinstance(error, UnauthenticatedError):
        return f"{what}: no credentials for Google Cloud: {_CREDENTIALS}"
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    if isinstance(error, PermissionDeniedError) or status == 403:
        return f"{what}: no permission: give this account the role Storage Object Admin on the bucket"
    if status == 404:
        return f"{what}: there is no such bucket: make it, or name another one"
    if status is not None and 400 <= status < 500 and status not in (408, 409, 412, 429):
        return f"{what}: refused ({_line(error)})"
    return None


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
