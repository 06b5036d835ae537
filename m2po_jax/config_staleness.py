"""Which rollouts a learner step reads, as configuration; `rollouts.staleness` has the arithmetic."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from m2po_jax.errors import require


@dataclass(frozen=True)
class SourceConfig:
    """Which rollouts a learner step reads; ages are in model updates, counted at a batch's first update."""

    policy: Literal["exactly", "at_most", "uniform", "frozen"] = "exactly"
    """The rule."""
    k: int = 0
    """exactly: the age (version 0 while the learner is younger); at_most: the age at the batch's last update."""
    low: int = 0
    """uniform: the least age."""
    high: int = 0
    """uniform: the greatest age; what is older than the run is version 0."""
    run: str | None = None
    """frozen: the run to read, a directory or URL; None: this one's version 0."""
    version: int | None = None
    """frozen: the version of that run to read; None: all its whole batches, in order."""
    share: float = 1.0
    """Of the batches of a mixture, relative to the other parts."""

    def __post_init__(self):
        for name in ("k", "low"):
            value = getattr(self, name)
            require(value >= 0, f"staleness.{name} is {value}: staleness is 0 or more model updates")
        require(self.high >= self.low, f"staleness.high {self.high} is below staleness.low {self.low}")
        require(
            self.version is None or self.version >= 0, f"staleness.version is {self.version}: use 0 or more, or None"
        )
        require(
            self.run is not None or self.version in (None, 0),
            f"staleness.version is {self.version}: of this run only version 0 is there from the start;"
            " name another with staleness.run",
        )
        require(self.share > 0, f"staleness.share is {self.share}: use a positive number")

    def require_satisfiable(self, updates_per_batch: int, publish_every: int) -> None:
        """Raises ConfigError if no version of the age that is asked for will ever exist."""
        if self.policy == "exactly":
            require(
                self.k % publish_every == 0,
                f"staleness.k {self.k} is not a multiple of the publishing interval"
                f" {publish_every}: no version of that age exists",
            )
        elif self.policy == "at_most":
            require(
                self.k >= publish_every - 1,
                f"staleness.k {self.k} can never be satisfied: with learner.updates_per_batch {updates_per_batch} and"
                f" publishing every {publish_every}, the last update on the newest data is {publish_every - 1} updates"
                f" behind: use {publish_every - 1} or more",
            )
        elif self.policy == "uniform":
            least = -(-self.low // updates_per_batch) * updates_per_batch
            most = self.high // updates_per_batch * updates_per_batch
            require(
                most - least >= publish_every - updates_per_batch,
                f"staleness.low {self.low} and staleness.high {self.high} can never be satisfied: versions are"
                f" {publish_every} updates apart and batches {updates_per_batch}: widen the range",
            )


@dataclass(frozen=True)
class StalenessConfig(SourceConfig):
    """Which rollouts a learner step reads."""

    policy: Literal["exactly", "at_most", "uniform", "frozen", "mixture"] = "exactly"  # type: ignore[assignment]
    """`exactly`: version n trains on data of version n - k; `at_most`, `uniform`, `frozen`, `mixture` of parts."""
    parts: Annotated[tuple[SourceConfig, ...], tyro.conf.Suppress] = ()
    """mixture: the parts, each with its share of the batches."""

    def __post_init__(self):
        super().__post_init__()
        require(
            (self.policy == "mixture") == bool(self.parts),
            f"staleness.policy is {self.policy} with {len(self.parts)} staleness.parts: parts belong to a mixture",
        )

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """The parts of a mixture, or the one rule."""
        return self.parts or (self,)

    def require_satisfiable(self, updates_per_batch: int, publish_every: int) -> None:
        """Raises ConfigError if no version of the age that is asked for will ever exist."""
        for part in self.parts:
            part.require_satisfiable(updates_per_batch, publish_every)
        super().require_satisfiable(updates_per_batch, publish_every)

    def __str__(self) -> str:
        """As in `exactly(256)`."""
        return _rule(self)


def _rule(source: SourceConfig) -> str:
    numbers: dict[str, list[Any]] = {
        "exactly": [source.k],
        "at_most": [source.k],
        "uniform": [source.low, source.high],
        "frozen": [source.run or "this run", "all" if source.run and source.version is None else source.version or 0],
        "mixture": [f"{part.share:g} {_rule(part)}" for part in getattr(source, "parts", ())],
    }
    return f"{source.policy}({', '.join(map(str, numbers[source.policy]))})"
