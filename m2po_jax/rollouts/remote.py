"""Object stores: opened with Google's own credentials, asked again when they fail for a moment, errors in one line."""

import logging
import os
import random
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from m2po_jax.config import UserError

T = TypeVar("T")

PATIENCE_S = 300.0
"""How long a store that does not answer is asked again."""

_LOG = logging.getLogger(__name__)
_WARN_AFTER_S = 10.0
_LONGEST_PAUSE_S = 15.0
_PASSING = re.compile(r"non-2xx status code: (?:408|429|5\d\d)|error sending request|body error|timed out|incomplete")
_NO_TOKEN = re.compile(r"token request")
_NO_KEY = re.compile(r"credential|service account|private key", re.IGNORECASE)
_FORBIDDEN = re.compile(r"non-2xx status code: 40[13]")
_NO_BUCKET = re.compile(
    r"NoSuchBucket|specified bucket does not exist|list request.*non-2xx status code: 404", re.DOTALL
)
# A short word with the server that hides single faults; longer ones are ours, as it repeats neither writes that timed
# out nor listings that broke off.
_RETRY: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}
# The whole answer may take long, as objects may be large; silence in it may not.
_CLIENT = {"connect_timeout": "5s", "read_timeout": "20s", "timeout": "600s"}


class StoreAway(ConnectionError):
    """The store did not answer for as long as it was asked."""


def open_remote(url: str) -> Any:
    """obstore's client for a URL; credentials are found as Google's libraries find them.

    Raises UserError for a URL that is none, and where credentials are found and cannot be used.
    """
    emulated = os.environ.get("STORAGE_EMULATOR_HOST", "").startswith("http://")
    options: Any = _CLIENT | ({"allow_http": True} if emulated else {})
    try:
        return from_url(url, retry_config=_RETRY, client_options=options)
    except (BaseError, ValueError, OSError) as error:
        if _NO_KEY.search(str(error)):
            raise _no_credentials(error, url) from error
        raise UserError(f"{url} is no store ({first_line(error)}): use a directory or gs://bucket/prefix") from error


def retried(location: str, call: Callable[[], T], patience_s: float = PATIENCE_S) -> T:
    """The result of a request, which is made again while the store is overloaded, silent or breaks off.

    Raises UserError at once for a bucket that is not there, for missing credentials and permissions, StoreAway when
    `patience_s` is over; other errors as they are. Says in one line that it waits, should it take long.
    """
    began, pause, warned = time.monotonic(), 0.1, False
    while True:
        try:
            result = call()
        except (BaseError, FileNotFoundError) as error:
            if (said := _said(error, location)) is not None:
                raise said from error
            if isinstance(error, FileNotFoundError) or not _PASSING.search(str(error)):
                raise
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise StoreAway(f"{location} did not answer for {waited:.0f} s ({first_line(error)})") from error
            if waited > _WARN_AFTER_S and not warned:
                _LOG.warning(
                    "%s does not answer (%s): asking again for %.0f s", location, first_line(error), patience_s
                )
                warned = True
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            continue
        if warned:
            _LOG.warning("%s answers again, after %.0f s", location, time.monotonic() - began)
        return result


def no_bucket(location: str) -> UserError:
    """The error for a bucket that does not exist."""
    bucket = "/".join(location.split("/")[:3])
    return UserError(f"{bucket} is not there: check the name, or make the bucket, e.g. gcloud storage buckets create")


def first_line(error: BaseException) -> str:
    """What an error says first, without the details that obstore adds."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    status = re.search(r"status code: (\d+ [\w ]+)", text)
    return status[1].strip() if status else text.split(" - ")[-1][:200]


def _said(error: BaseException, location: str) -> UserError | None:
    """One line for what the user can mend; None for anything else."""
    text = str(error)
    if _NO_BUCKET.search(text):
        return no_bucket(location)
    if _NO_TOKEN.search(text):
        return _no_credentials(error, location)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or _FORBIDDEN.search(text):
        return UserError(
            f"no permission for {location} ({first_line(error)}): use credentials that may read and write there,"
            " e.g. the role Storage Object Admin on the bucket"
        )
    return None


def _no_credentials(error: BaseException, location: str) -> UserError:
    return UserError(
        f"no usable Google credentials for {location} ({first_line(error)}): run"
        " gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
    )
