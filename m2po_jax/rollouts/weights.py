"""Published weights: parameters by version through Orbax, visible only once whole, bound to their digest."""

import functools
import hashlib
import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from m2po_jax.config import UserError
from m2po_jax.rollouts.paths import LATEST, WEIGHTS, parse_version, weights_path
from m2po_jax.rollouts.store import Store, is_no_room, no_room

_LOG = logging.getLogger(__name__)
_PUBLISHING = threading.Lock()
_LOADING = threading.Lock()
_DIGEST = "params_digest"
_METADATA = "_CHECKPOINT_METADATA"  # where Orbax keeps custom metadata; read here because its own reader takes 17 ms


@dataclass(frozen=True)
class Published:
    """The outcome of a publication."""

    version: int
    digest: str
    """Digest of the weights that stand under the version now."""
    created: bool
    """False when the version was there already; its weights were kept."""


def params_digest(params: Any) -> str:
    """sha256 over the path, dtype, shape and bytes of every leaf, in sorted order of path."""
    leaves = _named_leaves(params)
    state = hashlib.sha256()
    for path in sorted(leaves):
        array = np.ascontiguousarray(jax.device_get(leaves[path]))
        state.update(f"{path} {array.dtype.name} {np.shape(leaves[path])}\n".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def publish(store: Store, version: int, params: Any) -> Published:
    """Make the parameters of a version visible, whole, then point LATEST at it; usable from any thread.

    The arrays must not be donated before this returns: give a background thread a copy on the host.
    A version that is there already is kept: with the same digest that is success, with another one it is also
    reported as a warning, and the digest of what is there is returned. Raises UserError when the disk is full.
    """
    params = jax.device_get(params)
    with _PUBLISHING:
        _sweep(store, version)
        published = _save(store, version, params, params_digest(params))
        _point_latest(store, version, published.digest)
    return published


def load(store: Store, version: int, abstract_params: Any) -> tuple[Any, str]:
    """The parameters of a version and their digest, which is verified.

    Leaves of `abstract_params` give shapes and dtypes, and shardings where they have one (default device otherwise).
    Raises UserError when the version is missing, damaged, or of another shape.
    """
    recorded = read_digest(store, version)
    location = store.location(weights_path(version))
    try:
        with _LOADING:
            params = _loader().restore(location, args=ocp.args.StandardRestore(jax.tree.map(_target, abstract_params)))
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        reason = _mismatch(location, abstract_params) or f"they are damaged ({repr(error)[:200]})"
        raise _unusable(location, version, reason) from error
    if params_digest(params) != recorded or _shapes(params) != _shapes(abstract_params):
        reason = _mismatch(location, abstract_params) or "their content does not match their digest"
        raise _unusable(location, version, reason)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), params), recorded


def read_digest(store: Store, version: int) -> str:
    """The digest recorded with a version's weights; raises UserError naming the versions there are when missing."""
    location = store.location(weights_path(version))
    try:
        return str(json.loads(store.get(f"{weights_path(version)}/{_METADATA}"))["custom_metadata"][_DIGEST])
    except FileNotFoundError as error:
        there = ", ".join(map(str, versions(store))) or "none"
        raise UserError(
            f"no weights of version {version} at {location}: the versions there are {there};"
            " to make it again, delete the checkpoints after it and resume, or start a new run"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(location, version, f"their metadata is unreadable ({error!r})") from error


def latest(store: Store) -> tuple[int, str] | None:
    """The newest published (version, digest), from the one small object LATEST; None before the first."""
    try:
        pointer = json.loads(store.get(LATEST))
        return int(pointer["version"]), str(pointer["digest"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{store.location(LATEST)} is unreadable ({error!r}): delete it and resume the run") from error


def versions(store: Store) -> list[int]:
    """Versions whose weights are there, in order; unfinished and half-deleted ones do not count."""
    return [version for name in store.children(WEIGHTS) if (version := parse_version(name)) is not None]


def retire(store: Store, version: int) -> None:
    """Delete the weights of a version; that there are none is success."""
    store.delete_prefix(weights_path(version))


def _save(store: Store, version: int, params: Any, digest: str) -> Published:
    location = store.location(weights_path(version))
    if version not in versions(store):
        try:
            _saver().save(location, args=ocp.args.StandardSave(params), custom_metadata={_DIGEST: digest})
            return Published(version, digest, created=True)
        except Exception as error:  # Orbax and TensorStore raise many types
            if is_no_room(error):
                raise no_room(location) from error
            if version not in versions(store):  # not a lost race either
                raise
    there = read_digest(store, version)
    if there != digest:
        _LOG.warning("%s holds other weights already: kept %s, not %s", location, there[:12], digest[:12])
    return Published(version, there, created=False)


def _point_latest(store: Store, version: int, digest: str) -> None:
    current = latest(store)
    if current is None or current[0] < version:
        store.replace(LATEST, (json.dumps({"version": version, "digest": digest}) + "\n").encode())


def _sweep(store: Store, version: int) -> None:
    for name in store.children(WEIGHTS):
        if name.startswith(f"{version:08d}.") or ".deleting-" in name:
            store.delete_prefix(f"{WEIGHTS}/{name}")


def _named_leaves(params: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _target(leaf: Any) -> Any:
    if getattr(leaf, "sharding", None) is not None:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
    return np.empty(leaf.shape, leaf.dtype)  # read as numpy: half the time of a device array


def _unusable(location: str, version: int, reason: str) -> UserError:
    return UserError(
        f"the weights of version {version} at {location} cannot be used: {reason};"
        " use the run's own configuration, or delete that directory and resume the run that wrote it"
    )


def _mismatch(location: str, abstract_params: Any) -> str | None:
    """The first leaf that the saved weights and the model do not agree on."""
    try:
        saved = _shapes(_loader().metadata(location).item_metadata.tree)
    except Exception:  # damaged so far that nothing can be compared
        return None
    wanted = _shapes(abstract_params)
    for path in sorted(saved.keys() | wanted.keys()):
        if saved.get(path) != wanted.get(path):
            return f"{path} is {saved.get(path, 'missing')}, this model has {wanted.get(path, 'none')}"
    return None


def _shapes(tree: Any) -> dict[str, str]:
    return {path: f"{np.dtype(leaf.dtype).name}{tuple(leaf.shape)}" for path, leaf in _named_leaves(tree).items()}


@functools.cache
def _saver() -> ocp.Checkpointer:
    # Orbax logs the traceback of each of its threads that fails, and then raises the same error here.
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


@functools.cache
def _loader() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())
