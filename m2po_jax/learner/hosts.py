"""The hosts of one job, a process each: they start together, agree before each step, and stop together.

What they tell one another here goes through JAX's coordination service, not through their devices, and every wait
ends: when a host dies, JAX ends the others within `HEARTBEAT_S`.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed

from m2po_jax.config import UserError

HEARTBEAT_S = 30
"""A host that has said nothing for so long is lost, and the job with it."""
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_CONNECT_S = 300
_LEAVE_S = 120
"""What a host that goes wrong waits for the others to hear of it; then it leaves, and JAX ends them."""
_LOST = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "Gloo", "heartbeat", "oordination", "Barrier")
"""In what JAX says where another host is the cause."""
_TOLD = "m2po-told"


class LostHost(Exception):
    """Another host does not answer; the job cannot go on, and resumes from its last checkpoint."""


class _Told(UserError):
    """An error that another host met."""


class Hosts:
    """What the hosts say to one another; all of them make the same calls in the same order. One host is a job too."""

    def __init__(self, patience_s: float = 3600.0):
        """`patience_s` is how long the slowest host may take to its next call."""
        self.index, self.count = jax.process_index(), jax.process_count()
        self._client: Any = distributed.global_state.client
        self._patience_s, self._calls = patience_s, 0

    @property
    def first(self) -> bool:
        """Whether this is the host that writes what one host writes for all."""
        return self.index == 0

    def gather(self, what: str, value: Any = None) -> list[Any]:
        """The values of all hosts, in their order, once all of them have come here.

        Args:
            what: what they agree on, for messages.
            value: anything that JSON holds.

        Raises:
            UserError: another host met one; it is told by its number.
            LostHost: one did not come, or failed.
        """
        return [value] if self.count == 1 else self._gather({"what": what, "value": value}, self._patience_s)

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Raises UserError, on every host, if one has another `value` than the first; it names the keys."""
        first, *others = self.gather(what, value)
        for index, other in enumerate(others, 1):
            if other != first:
                keys = sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))
                differences = ", ".join(f"{key} ({first.get(key)!r} and {other.get(key)!r})" for key in keys)
                raise _Told(f"hosts 0 and {index} have another {what}: {differences}; start all with one command")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Around all that the hosts do: tells the error of one to the others, and says in a line that one is lost."""
        try:
            yield
        except (_Told, LostHost):
            raise
        except UserError as error:
            self._tell(error=str(error))
            raise
        except SystemExit as refused:  # tyro has said why
            if refused.code:
                self._tell(error="its command line was refused")
            raise
        except Exception as error:
            is_lost = isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in _LOST)
            if is_lost and self.count > 1:
                raise LostHost(_first_line(error)) from error
            self._tell(failure=f"{type(error).__name__}: {_first_line(error)}")
            raise

    def _tell(self, **said: str) -> None:
        """Say, where the others come next, what keeps this host from coming."""
        if self.count > 1:
            with contextlib.suppress(LostHost, UserError, jax.errors.JaxRuntimeError):
                self._client.key_value_set(f"{_TOLD}/{self.index}", json.dumps(said))
                self._gather({"what": "what went wrong", **said}, _LEAVE_S)

    def _gather(self, said: dict[str, Any], patience_s: float) -> list[Any]:
        """One round: say, wait for all, hear, and forget what was said in the round before, which all have heard."""
        client, room = self._client, f"m2po/{self._calls:09d}"
        self._calls += 1
        try:
            client.key_value_set(f"{room}/{self.index}", json.dumps(said))
            client.wait_at_barrier(room, int(patience_s * 1000))
            heard = self._said_in(room)
            if any("value" not in answer for answer in heard.values()):
                client.wait_at_barrier(f"{room}/heard", _LEAVE_S * 1000)  # host 0 must not leave before
            if self._calls > 1:
                client.key_value_delete(f"m2po/{self._calls - 2:09d}/{self.index}")
        except jax.errors.JaxRuntimeError as error:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a host may have gone that could not wait longer
                self._raise_told(self._said_in(_TOLD))
            raise LostHost(f"waiting for {said['what']}: {_first_line(error)}") from error
        self._raise_told(heard)
        answers = [heard[index] for index in range(self.count)]
        if "value" in said and len({answer["what"] for answer in answers}) > 1:
            raise RuntimeError(f"the hosts have come apart: {[answer['what'] for answer in answers]}")
        return [answer.get("value") for answer in answers]

    def _said_in(self, room: str) -> dict[int, dict[str, Any]]:
        """What each host has said there, by its number."""
        return {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in self._client.key_value_dir_get(room)}

    def _raise_told(self, heard: dict[int, dict[str, Any]]) -> None:
        """Raise what another host says that it met."""
        for index, answer in heard.items():
            if index != self.index and "error" in answer:
                raise _Told(f"host {index}: {answer['error']}")
            if index != self.index and "failure" in answer:
                raise LostHost(f"host {index}: {answer['failure']}")


def connect() -> None:
    """Join the other hosts, found by JAX itself (TPU slices, GKE, Slurm) or by three environment variables.

    Those are JAX_COORDINATOR_ADDRESS (host:port of host 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID. Before anything else
    asks JAX for its devices.

    When the others do not come within five minutes, JAX ends the process.

    Raises:
        UserError: the hosts are not described.
    """
    given = [os.environ.get(name) for name in _VARIABLES]
    # Its handler would take SIGTERM away from ours.
    jax.config.update("jax_enable_preemption_service", False)
    options: dict[str, Any] = {"heartbeat_timeout_seconds": HEARTBEAT_S, "shutdown_timeout_seconds": HEARTBEAT_S}
    options["initialization_timeout"], waiting = _CONNECT_S, "found by JAX"
    if all(given):
        count, index = _whole(1), _whole(2)
        if not index < count:
            raise UserError(f"{_VARIABLES[2]} is {index}: with {_VARIABLES[1]} {count} use 0 to {count - 1}")
        options |= {"coordinator_address": given[0], "num_processes": count, "process_id": index}
        options["cluster_detection_method"] = "deactivate"
        waiting = f"host {index} of {count}, at {given[0]}"
    elif any(given):
        lacking = ", ".join(name for name, value in zip(_VARIABLES, given, strict=True) if not value)
        raise UserError(f"{lacking} is not set: a job of several hosts needs {', '.join(_VARIABLES)} on each")
    print(f"m2po: joining the hosts of this job ({waiting}); waits five minutes at most", file=sys.stderr, flush=True)
    try:
        jax.distributed.initialize(**options)
    except (jax.errors.JaxRuntimeError, ValueError, RuntimeError, OSError) as error:
        raise UserError(
            f"the hosts of this job cannot be joined ({_first_line(error)}): on TPU slices and GKE they are found by"
            f" themselves; elsewhere set {', '.join(_VARIABLES)} on each"
        ) from error


def _whole(index: int) -> int:
    text = os.environ[_VARIABLES[index]]
    if not text.isdecimal():
        raise UserError(f"{_VARIABLES[index]} is {text!r}: use a whole number")
    return int(text)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
