"""The dependency order of the package, read from its source: downward only, no circles, formats in one place."""

import ast
import json
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "m2po_jax"
LEVELS = (
    {"config", "config_json", "config_server", "config_staleness", "errors"},
    {"objectives", "models", "rollouts", "tasks"},
    {"learner", "generation", "evaluation", "planning", "analysis"},
    {"cli", "cli_store", "cli_training", "lockstep", "opening", "services", "sweep"}
    | {"exporting", "catalog", "progress", "__main__"},
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
BANNED_PAIRS = {
    ("learner", "generation"),
    ("generation", "learner"),
    ("analysis", "learner"),
    ("analysis", "generation"),
}
PURE_PARTS = {"objectives", "models"}
OWNERS = {
    "obstore": (f"{PACKAGE}.rollouts",),
    "pyarrow": (f"{PACKAGE}.rollouts",),
    "orbax": (f"{PACKAGE}.rollouts", f"{PACKAGE}.learner.checkpoints"),
}
UNSAFE_FORMATS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 70

Imports = dict[str, set[str]]


def module_name(path: Path, root: Path) -> str:
    """`m2po_jax/rollouts/store.py` -> `m2po_jax.rollouts.store`; a package is named without `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute_target(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that a `from ... import` names, with the leading dots resolved."""
    if node.level == 0:
        return node.module or ""
    parents = module.split(".")
    base = parents[: len(parents) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def imported_names(tree: ast.AST, module: str, is_package: bool = False) -> set[str]:
    """Dotted names that a module imports, at its top or inside functions; `from a import b` gives `a.b`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            target = absolute_target(node, module, is_package)
            found |= {f"{target}.{alias.name}" for alias in node.names}
    return found


def source_files(root: Path) -> list[Path]:
    return sorted((root / PACKAGE).rglob("*.py"))


def package_imports(root: Path) -> Imports:
    """Every module of the package with the dotted names that it imports."""
    imports = {}
    for path in source_files(root):
        module = module_name(path, root)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imports[module] = imported_names(tree, module, path.name == "__init__.py")
    return imports


def part_of(name: str) -> str | None:
    """The part of the package a dotted name lies in (`rollouts`); None outside of it and for its root."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 and parts[1] != "__version__" else None


def part_edges(imports: Imports) -> Iterator[tuple[str, str, str]]:
    """(importing module, its part, part imported), where the two parts differ."""
    for module, names in imports.items():
        part = part_of(module) or "__init__"
        for used in sorted({part_of(name) for name in names} - {None, part}):
            yield module, part, str(used)


def order_faults(imports: Imports) -> list[str]:
    """Imports that point upward, between banned pairs, out of a pure part, or from the package's root."""
    faults = []
    for module, part, used in part_edges(imports):
        if part == "__init__" or LEVEL.get(used, len(LEVELS)) > LEVEL.get(part, -1):
            faults.append(f"{module} imports {used}, which lies above it")
        if (part, used) in BANNED_PAIRS:
            faults.append(f"{module} imports {used}: the two share nothing but the store")
        if part in PURE_PARTS and used != "config":
            faults.append(f"{module} imports {used}: {part} imports nothing of the project but config")
    return faults


def owner_faults(imports: Imports) -> list[str]:
    """Imports of a storage library outside of its owners, of experiments, and of formats that run code."""
    faults = []
    for module, names in imports.items():
        for top in sorted({name.split(".")[0] for name in names}):
            owners = OWNERS.get(top, ())
            if owners and not any(module == owner or module.startswith(f"{owner}.") for owner in owners):
                faults.append(f"{module} imports {top}: only {' and '.join(owners)} may")
            if top in UNSAFE_FORMATS:
                faults.append(f"{module} imports {top}: reading it can run code")
            if top == "experiments":
                faults.append(f"{module} imports experiments: configs are handed in, never fetched")
    return faults


def module_graph(imports: Imports) -> Imports:
    """Edges between modules of the package: a name imported from a module counts as that module."""
    graph: Imports = {}
    for module, names in imports.items():
        targets = {name if name in imports else name.rpartition(".")[0] for name in names}
        graph[module] = {target for target in targets if target in imports and target not in {module, PACKAGE}}
    return graph


def part_graph(imports: Imports) -> Imports:
    graph: Imports = {}
    for _, part, used in part_edges(imports):
        graph.setdefault(part, set()).add(used)
    return graph


def circle(graph: Imports) -> list[str]:
    """The members of one circle, or nothing where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def long_code(path: Path) -> list[str]:
    """A file, and the functions in it, over the limits of length."""
    source = path.read_text(encoding="utf-8")
    faults = []
    if (lines := len(source.splitlines())) >= MOST_FILE_LINES:
        faults.append(f"{path.name} has {lines} lines: split it by noun, under {MOST_FILE_LINES}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_FUNCTION_LINES:
                faults.append(f"{path.name}: {node.name} has {length} lines, at most {MOST_FUNCTION_LINES}")
    return faults


def notebook_imports(path: Path) -> set[str]:
    """Dotted names that the code cells of a notebook import; lines of IPython magic are left out."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).splitlines()]
    code = "\n".join(line for line in lines if not line.startswith(("%", "!")))
    return imported_names(ast.parse(code), "notebook")


def test_every_part_has_a_level():
    parts = {part for module in package_imports(ROOT) if (part := part_of(module))}
    assert parts <= set(LEVEL), f"give these a level in LEVELS, and DESIGN a line: {sorted(parts - set(LEVEL))}"


def test_imports_point_downward():
    assert order_faults(package_imports(ROOT)) == []


def test_formats_and_storage_have_one_owner():
    assert owner_faults(package_imports(ROOT)) == []


def test_no_circles():
    imports = package_imports(ROOT)
    assert circle(part_graph(imports)) == []
    assert circle(module_graph(imports)) == []


def test_files_and_functions_are_short():
    assert [fault for path in source_files(ROOT) for fault in long_code(path)] == []


def test_notebooks_import_only_analysis():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        parts = {part_of(name) for name in notebook_imports(path)} - {None}
        assert parts <= {"analysis"}, f"{path.name} imports {sorted(map(str, parts))}"


def tree_with(root: Path, **sources: str) -> Imports:
    """The imports of a made-up package: `rollouts__store="import os"` is `m2po_jax/rollouts/store.py`."""
    for name, source in sources.items():
        path = root / PACKAGE / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return package_imports(root)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rollouts__store", "from m2po_jax.learner import loop"),
        ("rollouts__store", "from ..learner.loop import learn"),
        ("config", "def late():\n    import m2po_jax.tasks.arithmetic"),
        ("learner__loop", "from m2po_jax.generation import engine"),
        ("generation__engine", "import m2po_jax.learner.loop as loop"),
        ("analysis__report", "from m2po_jax import learner"),
        ("models__decoder", "from m2po_jax import objectives"),
        ("learner__loop", "from m2po_jax import cli"),
    ],
)
def test_a_wrong_direction_is_found(tmp_path, module, source):
    assert order_faults(tree_with(tmp_path, **{module: source})) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("learner__batches", "import pyarrow.parquet as pq"),
        ("analysis__frames", "from obstore.store import LocalStore"),
        ("learner__loop", "import orbax.checkpoint as ocp"),
        ("learner__checkpoints_old", "import orbax.checkpoint"),
        ("rollouts__shard", "import pickle"),
        ("sweep", "from experiments import quickstart"),
    ],
)
def test_a_wrong_owner_is_found(tmp_path, module, source):
    assert owner_faults(tree_with(tmp_path, **{module: source})) != []


def test_what_is_allowed_is_not_a_fault(tmp_path):
    imports = tree_with(
        tmp_path,
        config="from m2po_jax import __version__\nimport json",
        rollouts__store="import obstore\nimport pyarrow\nfrom m2po_jax.config import RunConfig\nfrom . import shard",
        rollouts__shard="import orbax.checkpoint",
        learner__checkpoints="import orbax.checkpoint\nfrom m2po_jax.rollouts import store",
        evaluation__table="from m2po_jax.generation import engine\nfrom m2po_jax import objectives",
        sweep="from m2po_jax import cli, lockstep",
    )
    assert order_faults(imports) + owner_faults(imports) + circle(module_graph(imports)) == []


def test_circles_are_found(tmp_path):
    between_parts = tree_with(
        tmp_path / "parts",
        tasks__prompts="from m2po_jax.rollouts import store",
        rollouts__shard="from m2po_jax.tasks import grading",
    )
    between_files = tree_with(
        tmp_path / "files",
        rollouts__shard="from m2po_jax.rollouts.store import Store",
        rollouts__store="from .shard import read",
    )
    assert set(circle(part_graph(between_parts))) == {"tasks", "rollouts"}
    assert circle(part_graph(between_files)) == []
    assert set(circle(module_graph(between_files))) == {"m2po_jax.rollouts.shard", "m2po_jax.rollouts.store"}


def test_long_code_is_found(tmp_path):
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    pass\n" * 600, encoding="utf-8")
    assert len(long_code(path)) == 2
    path.write_text("def f():\n" + "    pass\n" * 20, encoding="utf-8")
    assert long_code(path) == []
    path.write_text("def f():\n" + "    pass\n" * 80, encoding="utf-8")
    assert long_code(path) == ["long.py: f has 81 lines, at most 70"]


def test_notebook_imports_are_read(tmp_path):
    path = tmp_path / "a.ipynb"
    source = ["%matplotlib inline\n", "from m2po_jax.analysis import report\n", "import m2po_jax.learner\n"]
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": source}]}), encoding="utf-8")
    assert {part_of(name) for name in notebook_imports(path)} == {"analysis", "learner"}
