"""Published weights: parameters by version through Orbax, visible only once whole, bound to their digest.

On several hosts each writes the parts that its devices hold, and all of them call `publish` and `load` in one order.
"""

import contextlib
import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from orbax.checkpoint.options import MultiprocessingOptions

from m2po_jax.config import UserError
from m2po_jax.rollouts import staging
from m2po_jax.rollouts.paths import LATEST, WEIGHTS, parse_version, weights_path
from m2po_jax.rollouts.store import Store, is_no_room, no_room

_LOG = logging.getLogger(__name__)
_PUBLISHING = threading.Lock()
_LOADING = threading.Lock()
_DIGEST = "params_digest"
_SEEDS = (0x9E3779B9, 0x7F4A7C15, 0xF39CC060, 0x5CEDC834)
_METADATA = "_CHECKPOINT_METADATA"  # where Orbax keeps custom metadata; read here because its own reader takes 17 ms


@dataclass(frozen=True)
class Published:
    """The outcome of a publication."""

    version: int
    digest: str
    """Digest of the weights that stand under the version now."""
    created: bool
    """False when the version was there already; its weights were kept."""


class Snapshot(NamedTuple):
    """Parameters as they are to be published: arrays of their own, which no update donates."""

    params: Any
    sums: Array
    """uint32 (leaves, 4): a sum over the elements of each leaf, in sorted order of path."""

    @property
    def digest(self) -> str:
        """sha256 over the path, dtype, shape and sums of every leaf; waits for the device."""
        state = hashlib.sha256()
        leaves = _named_leaves(self.params)
        for path, sums in zip(sorted(leaves), jax.device_get(self.sums), strict=True):
            state.update(f"{path} {np.dtype(leaves[path].dtype).name} {np.shape(leaves[path])} {sums}\n".encode())
        return state.hexdigest()


def snapshot(params: Any, dtypes: Any = None) -> Snapshot:
    """Copy and sum the parameters on their devices; returns at once, and they may then be donated.

    `dtypes` is a tree like theirs, of what to publish in; None keeps what they have.
    """
    params = jax.tree.map(_on_device, params)
    if dtypes is None:
        dtypes = jax.tree.map(lambda x: x.dtype, params)
    copied = _copied(params, tuple(np.dtype(dtype).name for dtype in jax.tree.leaves(dtypes)))
    return Snapshot(copied, _all_sums(copied))


def params_digest(params: Any) -> str:
    """What `Snapshot.digest` says of the parameters as they are, however they are laid out on devices."""
    params = jax.tree.map(_on_device, params)
    return Snapshot(params, _all_sums(params)).digest


def publish(store: Store, version: int, params: Any) -> Published:
    """Make a snapshot, or parameters, visible as a version, whole, then point LATEST at it; usable from any thread.

    Parameters must not be donated before this returns; a snapshot cannot be.
    A version that is there already is kept: with the same digest that is success, with another one it is also
    reported as a warning, and the digest of what is there is returned. Raises UserError when the disk is full.
    """
    taken = params if isinstance(params, Snapshot) else snapshot(params)
    digest = taken.digest
    with _PUBLISHING:
        if _speaks(taken.params):
            _sweep(store, version)
        published = _save(store, version, taken.params, digest)
        if _speaks(taken.params):
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
        with _LOADING, _readable(store, version) as directory:
            loader = _loader(_shared(abstract_params))
            params = loader.restore(directory, args=ocp.args.StandardRestore(jax.tree.map(_target, abstract_params)))
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        reason = _mismatch(location, abstract_params) or f"they are damaged ({repr(error)[:200]})"
        raise _unusable(location, version, reason) from error
    params = jax.tree.map(_on_device, params)
    if params_digest(params) != recorded or _shapes(params) != _shapes(abstract_params):
        reason = _mismatch(location, abstract_params) or "their content does not match their digest"
        raise _unusable(location, version, reason)
    return params, recorded


def read_digest(store: Store, version: int) -> str:
    """The digest recorded with a version's weights; raises UserError naming the versions there are when missing."""
    if (digest := find_digest(store, version)) is not None:
        return digest
    there = ", ".join(map(str, versions(store))) or "none"
    raise UserError(
        f"no weights of version {version} at {store.location(weights_path(version))}: the versions there are {there};"
        " to make it again, delete the checkpoints after it and resume, or start a new run"
    )


def find_digest(store: Store, version: int) -> str | None:
    """The digest recorded with a version's weights, or None when they are not there; in one request."""
    try:
        if store.local_path is None:
            facts = staging.committed(store, weights_path(version))
            return None if facts is None else str(facts[_DIGEST])
        return str(json.loads(store.get(f"{weights_path(version)}/{_METADATA}"))["custom_metadata"][_DIGEST])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        location = store.location(weights_path(version))
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


def fault(store: Store, version: int) -> str | None:
    """What is wrong with the weights of a version, whatever the model: read whole, and compared with their digest."""
    try:
        recorded = read_digest(store, version)
        with _LOADING, _readable(store, version) as directory:
            params = _loader(False).restore(directory, args=ocp.args.StandardRestore(_abstract(directory)))
    except UserError as error:
        return str(error)
    except Exception as error:  # Orbax and TensorStore raise many types for damaged files
        return f"damaged ({repr(error)[:200]})"
    return None if params_digest(params) == recorded else "their content does not match their digest"


def commit_facts(store: Store) -> Callable[[str], dict[str, Any]]:
    """Path of a directory of weights or checkpoints -> what it is committed with in an object store."""

    def facts(path: str) -> dict[str, Any]:
        kind, _, name = path.partition("/")
        return {_DIGEST: read_digest(store, int(name))} if kind == WEIGHTS else {}

    return facts


def versions(store: Store) -> list[int]:
    """Versions whose weights are there, in order; unfinished and half-deleted ones do not count."""
    names = staging.children(store, WEIGHTS) if store.local_path is None else store.children(WEIGHTS)
    return [version for name in names if (version := parse_version(name)) is not None]


def retire(store: Store, version: int) -> None:
    """Delete the weights of a version; that there are none is success."""
    if store.local_path is None:
        staging.delete(store, weights_path(version))
    else:
        store.delete_prefix(weights_path(version))


def _save(store: Store, version: int, params: Any, digest: str) -> Published:
    location = store.location(weights_path(version))
    if version not in versions(store):
        try:
            shared = _shared(params)
            arrays = ocp.args.StandardSave(params if shared else jax.device_get(params))
            with _writable(store, version, digest, shared) as directory:
                _saver(shared).save(directory, args=arrays, custom_metadata={_DIGEST: digest})
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


@contextlib.contextmanager
def _writable(store: Store, version: int, digest: str, shared: bool) -> Iterator[str]:
    """Where Orbax writes a version; it is there once this ends. Several hosts write to a remote store themselves."""
    if store.local_path is not None:
        yield store.location(weights_path(version))
    elif shared:
        yield store.location(weights_path(version))
        if jax.process_index() == 0:
            staging.commit(store, weights_path(version), {_DIGEST: digest})
    else:
        with staging.scratch() as scratch:
            yield str(scratch / "params")
            staging.upload(store, scratch / "params", weights_path(version), {_DIGEST: digest})


@contextlib.contextmanager
def _readable(store: Store, version: int) -> Iterator[str]:
    """Where Orbax reads a version; several hosts read what they need from a remote store themselves."""
    if store.local_path is not None or jax.process_count() > 1:
        yield store.location(weights_path(version))
        return
    with staging.scratch() as scratch:
        staging.download(store, weights_path(version), scratch)
        yield str(scratch)


def _point_latest(store: Store, version: int, digest: str) -> None:
    current = latest(store)
    if current is None or current[0] < version:
        store.replace(LATEST, (json.dumps({"version": version, "digest": digest}) + "\n").encode())


def _sweep(store: Store, version: int) -> None:
    """Delete what a publication that did not end has left."""
    if store.local_path is None:
        if find_digest(store, version) is None:
            store.delete_prefix(weights_path(version))
        return
    for name in store.children(WEIGHTS):
        if name.startswith(f"{version:08d}.") or ".deleting-" in name:
            store.delete_prefix(f"{WEIGHTS}/{name}")


@partial(jax.jit, static_argnames="dtypes")
def _copied(params: Any, dtypes: tuple[str, ...]) -> Any:
    leaves, structure = jax.tree.flatten(params)
    copies = (jnp.copy(x.astype(dtype)) for x, dtype in zip(leaves, dtypes, strict=True))
    return jax.tree.unflatten(structure, copies)


@jax.jit
def _all_sums(params: Any) -> Array:
    named = _named_leaves(params)
    return jnp.stack([_sums(named[path]) for path in sorted(named)])


def _sums(leaf: Array) -> Array:
    """Four sums of hashes of an element's bits and place, uint32 and modulo 2^32, so that their order is nothing."""
    width = leaf.dtype.itemsize * 8
    bits = jax.lax.bitcast_convert_type(leaf, f"uint{width}").astype(jnp.uint32)
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):
        place = _mixed(place + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis))
    lanes = (_mixed(bits ^ _mixed(place ^ jnp.uint32(seed))) for seed in _SEEDS)
    return jnp.stack([jnp.sum(lane, dtype=jnp.uint32) for lane in lanes])


def _mixed(x: Array) -> Array:
    """A bijection of 32 bits, each bit of which depends on all bits of `x`."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return x ^ (x >> jnp.uint32(16))


def _on_device(leaf: Any) -> Array:
    return leaf if isinstance(leaf, Array) else jax.device_put(leaf, may_alias=False)


def _shared(params: Any) -> bool:
    """Whether several hosts hold these arrays, or shapes with shardings, together."""
    where = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    return any(sharding is not None and not sharding.is_fully_addressable for sharding in where)


def _speaks(params: Any) -> bool:
    """Whether this host does what one host does for all that hold the arrays."""
    return jax.process_index() == 0 or not _shared(params)


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
        saved = _shapes(_loader(False).metadata(location).item_metadata.tree)
    except Exception:  # damaged so far that nothing can be compared
        return None
    wanted = _shapes(abstract_params)
    for path in sorted(saved.keys() | wanted.keys()):
        if saved.get(path) != wanted.get(path):
            return f"{path} is {saved.get(path, 'missing')}, this model has {wanted.get(path, 'none')}"
    return None


def _abstract(location: str) -> Any:
    """Numpy arrays with the saved shapes and dtypes."""
    saved = _loader(False).metadata(location).item_metadata.tree
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), saved)


def _shapes(tree: Any) -> dict[str, str]:
    return {path: f"{np.dtype(leaf.dtype).name}{tuple(leaf.shape)}" for path, leaf in _named_leaves(tree).items()}


@functools.cache
def _saver(shared: bool) -> ocp.Checkpointer:
    # Orbax logs the traceback of each of its threads that fails, and then raises the same error here.
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.getMessage())
    return ocp.Checkpointer(ocp.StandardCheckpointHandler(**_hosts(shared)), **_hosts(shared))


@functools.cache
def _loader(shared: bool) -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.StandardCheckpointHandler(**_hosts(shared)), **_hosts(shared))


def _hosts(shared: bool) -> dict[str, Any]:
    """Which hosts Orbax is to wait for; naming them keeps it from doing so by a program on their devices."""
    if jax.process_count() == 1:
        return {}
    me = jax.process_index()
    hosts = set(range(jax.process_count())) if shared else {me}
    options = MultiprocessingOptions(0 if shared else me, hosts, "weights" if shared else f"weights-{me}")
    return {"multiprocessing_options": options}
