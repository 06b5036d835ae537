"""Bounds on the time of a program: no chip does it faster than its published peaks allow."""

from dataclasses import dataclass

from m2po_jax.models.chips import Chip


@dataclass(frozen=True)
class Roofline:
    """Seconds that each part of a chip needs at its peak, all of them at work at once."""

    compute_s: float
    hbm_s: float
    interconnect_s: float

    @property
    def bound_s(self) -> float:
        """No run of this program takes less."""
        return max(self.compute_s, self.hbm_s, self.interconnect_s)

    @property
    def limit(self) -> str:
        """What sets the bound."""
        parts = {"compute": self.compute_s, "HBM": self.hbm_s, "interconnect": self.interconnect_s}
        return max(parts, key=lambda name: parts[name])

    def most_mfu(self, useful_flops: float, devices: int, chip: Chip) -> float:
        """Model FLOPs over peak FLOPs at the bound: a run's own MFU is below it."""
        return useful_flops / (self.bound_s * devices * chip.flops_per_s) if self.bound_s else 0.0


def roofline(chip: Chip, flops: float, hbm_bytes: float, sent_bytes: float) -> Roofline:
    """The bounds of a program by what it does on one device."""
    return Roofline(flops / chip.flops_per_s, hbm_bytes / chip.hbm_bytes_per_s, sent_bytes / chip.ici_bytes_per_s)
