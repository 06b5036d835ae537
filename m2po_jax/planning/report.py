"""Making a plan and keeping it: `plan.json` and `plan.txt` in a folder."""

from collections.abc import Callable
from pathlib import Path

from m2po_jax.config import Config, UserError
from m2po_jax.planning.chips import Topology
from m2po_jax.planning.plan import Plan, make_plan
from m2po_jax.planning.table import to_json, to_text


def write(
    config: Config, where: Topology, folder: str, say: Callable[[str], None], generators: Topology | None = None
) -> tuple[Plan, str]:
    """Make a plan, write it, and return it with its text; raises UserError as `make_plan`, or if it cannot write."""
    out = Path(folder)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}") from error
    plan = make_plan(config, where, say, generators)
    text = to_text(plan)
    (out / "plan.json").write_text(to_json(plan), encoding="utf-8")
    (out / "plan.txt").write_text(text, encoding="utf-8")
    return plan, text
