"""Published figures of TPU chips, by their names in topologies and by the kinds that JAX gives its devices."""

from dataclasses import dataclass

GiB = 2**30


@dataclass(frozen=True)
class Chip:
    """One chip, as its maker publishes it; JAX sees one device a chip."""

    name: str
    dimensions: int
    """Axes of its torus."""
    hbm_bytes: int
    """Capacity of its memory; the compiler keeps some of it for itself."""
    hbm_bytes_per_s: float
    """Peak bandwidth of its memory."""
    flops_per_s: float
    """Peak rate of bfloat16 products."""
    ici_bytes_per_s: float
    """Peak bandwidth of all its links to other chips together, in one direction: half the bidirectional figure."""
    source: str
    """The public page that says so."""


CHIPS = {
    "v5e": Chip("v5e", 2, 16 * GiB, 819e9, 197e12, 200e9, "https://docs.cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip("v5p", 3, 95 * GiB, 2765e9, 459e12, 600e9, "https://docs.cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip("v6e", 2, 32 * GiB, 1600e9, 918e12, 400e9, "https://docs.cloud.google.com/tpu/docs/v6e"),
}
"""Name in a topology -> chip. v5e: 400 GB/s bidirectional; v5p: 1200 GB/s bidirectional; v6e: 3200 Gb/s."""

_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`, such as "TPU v6 lite"; None where its figures are not known here."""
    return CHIPS[_KINDS[device_kind]] if device_kind in _KINDS else None
