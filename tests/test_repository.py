"""The repository itself: docstrings, the lock, the Makefile, what is packaged, and nothing of one machine in it."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import m2po_jax

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "m2po_jax"
# A home or working folder at the start of a path, not in the middle of an address or of a longer path.
MACHINE_PATH = re.compile(r"(?<![\w.\-}>*])/(?:home|root|work|Users)/[\w.]")
PIN = re.compile(r"^(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[\w.+!]+)(?: ; (?P<marker>.+))?$")


def setup_literal(name: str):
    """A constant list or dict of setup.py, by name."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise LookupError(f"setup.py assigns no {name}")


def requirements() -> list[Requirement]:
    """Everything that setup.py asks for, extras too."""
    extras = setup_literal("EXTRAS").values()
    return [Requirement(text) for group in [setup_literal("BASE"), *extras] for text in group]


def lock_lines() -> list[str]:
    """The lock without comments and empty lines."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def locked() -> dict[str, Version]:
    pins = [match for line in lock_lines() if (match := PIN.match(line))]
    return {pin["name"]: Version(pin["version"]) for pin in pins}


def repository_files(root: Path) -> list[Path]:
    """Files that are tracked or about to be; everything in an unpacked archive of them."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return [root / name for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    skipped = {".venv", ".venv-tpu", "runs", "build", "dist"}
    return [path for path in root.rglob("*") if path.is_file() and not skipped & set(path.relative_to(root).parts)]


def machine_paths(text: str) -> list[str]:
    """The lines of a text that hold a path of one machine."""
    return [line.strip() for line in text.splitlines() if MACHINE_PATH.search(line)]


def undocumented(source: str) -> list[str]:
    """Public modules, classes, functions and methods without a docstring, and how they are named."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            members = node.body if isinstance(node, ast.ClassDef) else []
            methods = [m for m in members if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            found += [part.name for part in [node, *methods] if not ast.get_docstring(part)]
    return found


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # as by hand
    return subprocess.run(["make", *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def test_public_names_have_docstrings():
    sources = {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert {str(path): names for path, source in sources.items() if (names := undocumented(source))} == {}


def test_missing_docstrings_are_found():
    source = '"""Module."""\ndef f(): pass\ndef _g(): pass\nclass C:\n    """C."""\n    def m(self): pass\n'
    assert undocumented(source) == ["f", "m"]
    assert undocumented("x = 1\n") == ["the module"]


def test_no_file_names_a_path_of_one_machine():
    faults = {}
    for path in repository_files(ROOT):
        try:
            lines = machine_paths(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        if lines:
            faults[str(path.relative_to(ROOT))] = lines
    assert faults == {}


@pytest.mark.parametrize("folder", ["home", "root", "work", "Users"])
def test_paths_of_one_machine_are_found(folder):
    assert machine_paths(f"see '/{folder}/x/notes.txt'") != []
    assert machine_paths(f"see https://example.com/{folder}/x and <run>/{folder}/x and ../{folder}/x") == []


def test_lock_holds_exact_versions_only():
    assert [line for line in lock_lines() if not PIN.match(line)] == []
    assert len(locked()) == len(lock_lines()), "a package is pinned twice: one version must serve every Python"


def test_lock_pins_every_requirement():
    pins = locked()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is missing from requirements.lock: run `make lock`"
        assert requirement.specifier.contains(pins[name]), f"the lock's {name}=={pins[name]} is not {requirement}"


def test_jax_and_jaxlib_are_locked_as_one():
    assert locked()["jax"] == locked()["jaxlib"]


def test_version_is_written_as_setup_reads_it():
    assert f'__version__ = "{m2po_jax.__version__}"' in (PACKAGE / "__init__.py").read_text(encoding="utf-8").split(
        "\n"
    )


def test_everything_in_the_package_is_packaged():
    patterns = ["py.typed", "analysis/*.j2"]
    assert f'package_data={{"m2po_jax": {patterns}}}'.replace("'", '"') in (ROOT / "setup.py").read_text()
    files = [path for path in repository_files(ROOT) if PACKAGE in path.parents]
    data = [path.relative_to(PACKAGE).as_posix() for path in files if path.suffix != ".py"]
    assert [name for name in data if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    folders = {path.parent for path in files}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_untyped_libraries_are_imported():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["overrides"]
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    names = [module.removesuffix(".*") for override in overrides for module in override["module"]]
    assert [name for name in names if not re.search(rf"^\s*(import|from) {name}\b", source, re.MULTILINE)] == []


def test_make_help_lists_every_target():
    targets = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0].split()
    listed = [line.split()[0] for line in make().stdout.splitlines()[1:]]
    assert sorted(listed) == sorted(targets)
    assert {"quickstart", "test", "test-fast", "test-plan", "test-extra"} <= set(targets)


def test_make_refuses_an_old_python(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "setup.py").touch()
    (tmp_path / "requirements.lock").touch()
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    old.chmod(0o755)
    refused = make("quickstart", f"PYTHON={old}", cwd=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.splitlines()[0].startswith(f"make: {old} is missing or older than Python 3.11")
    assert not (tmp_path / ".venv").exists()


def test_an_installed_environment_is_left_alone(tmp_path):
    for name in ("setup.py", "requirements.lock", ".venv/.made", ".venv/.installed"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    planned = make("-n", "quickstart", "PYTHON=unused", cwd=tmp_path).stdout
    assert planned.splitlines() == [".venv/bin/m2po sweep experiments/quickstart.py --runs runs/quickstart --seeds 7"]


def test_shell_scripts_pass_shellcheck():
    checked = [line for line in (ROOT / "Makefile").read_text(encoding="utf-8").splitlines() if "shellcheck --" in line]
    patterns = checked[0].partition("--external-sources ")[2].split()
    files = sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))
    scripts = [
        path for path in repository_files(ROOT) if path.read_bytes()[:64].splitlines()[:1] == [b"#!/usr/bin/env bash"]
    ]
    assert [name for path in scripts if (name := str(path.relative_to(ROOT))) not in files] == []
    program = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([program, "--external-sources", *files], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_ci_runs_all_tests():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert {"set -euo pipefail", "make test", "make test-extra"} <= set(script)
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
