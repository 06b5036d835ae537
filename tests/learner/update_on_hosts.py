"""`python -m tests.learner.update_on_hosts FOLDER MESH:MICRO_BATCHES[:packed][:scattered] ...`: a host.

Each packs and places only its own responses; scattered, as on slices, those are not one contiguous part of the rows.
The first writes what each update took off the parameters, and its metrics, to FOLDER.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from m2po_jax.learner.batches import on_mesh
from m2po_jax.learner.hosts import Hosts, connect
from m2po_jax.learner.packing import Packing
from m2po_jax.learner.state import init_state, shardings_of
from m2po_jax.learner.update import make_update
from m2po_jax.models import sharding
from m2po_jax.models.mesh import held, local_rows, make_mesh, row_parts, row_shares
from tests.learner import batches
from tests.learner.test_mesh import MESHES, policy
from tests.learner.test_packed import CUTS, RESPONSES, WIDTH, whole_batch


def main(folder: str, *wanted: str) -> None:
    connect()
    hosts = Hosts()
    for name in wanted:
        mesh_name, micro_batches, *how = name.split(":")
        devices = jax.devices()
        if "scattered" in how:
            devices = [devices[index] for index in (0, 4, 1, 5, 2, 6, 3, 7)]
        mesh = make_mesh(MESHES[mesh_name], devices)
        model, params = policy()
        params = jax.tree.map(np.asarray, params)
        state = init_state(jax.device_put(params, sharding.shardings(model.config, mesh)), batches.SGD)
        everything = whole_batch()
        own = local_rows(mesh, RESPONSES)
        assert ("scattered" in how) == bool(np.any(np.diff(own) > 1))
        batch = jax.tree.map(lambda x, own=own: np.asarray(x)[own], everything)
        limit = int(micro_batches)
        if "packed" in how:
            limit, size = CUTS[int(micro_batches)]
            packing = Packing(WIDTH, batches.RESPONSE, RESPONSES, limit, row_parts(mesh), row_shares(mesh))
            rows = packing.pack(batches.sequences(batch), size)
            batch = batch._replace(prompt_tokens=None, prompt_valid=None, packed=rows)
        batch = on_mesh(batch, mesh)
        np.testing.assert_array_equal(held(batch.rewards), np.asarray(everything.rewards)[own])
        spec = batches.spec("m2po", micro_batches=limit)._replace(model=model)
        everywhere = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):
            after, metrics = make_update(spec, batches.SGD, shardings_of(state))(state, batch)
            whole = jax.jit(lambda x: x, out_shardings=everywhere)(after.params)
        taken = jax.tree.map(np.subtract, params, jax.device_get(whole))
        shared = len(own) < RESPONSES
        if hosts.first:
            leaves = {f"params/{index}": leaf for index, leaf in enumerate(jax.tree.leaves(taken))}
            values = {f"metrics/{key}": value for key, value in jax.device_get(metrics).items()}
            np.savez(Path(folder) / f"{name.replace(':', '-')}.npz", shared=shared, **leaves, **values)
        hosts.gather("an update")


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    main(*sys.argv[1:])
