"""Stand-ins for gcloud, kubectl and a host's system services, since neither a project nor a slice is to be had here.

Requests are files with their states; a command over ssh is run by a real bash, in a home of its own for each request.
"""

import os
import sys
from pathlib import Path

GCLOUD = """#!{python}
import os, pathlib, subprocess, sys

folder = pathlib.Path({folder!r})
arguments = sys.argv[1:]
with (folder / "calls").open("a") as file:
    file.write(repr(arguments) + "\\n")
assert arguments[:3] == ["compute", "tpus", "queued-resources"], arguments
action, flags = arguments[3], dict(a.partition("=")[::2] for a in arguments[4:] if a.startswith("--"))
assert flags["--project"] == "some-project" and flags["--zone"] == "us-east5-b"
requests = folder / "requests"
requests.mkdir(exist_ok=True)
if action == "list":
    for path in sorted(requests.iterdir()):
        states = path.read_text().split()
        print(path.name, states[0], sep="\\t")
        path.write_text(" ".join(states[1:] or states))
    sys.exit((folder / "broken").exists())
path = requests / arguments[4]
if action == "create":
    assert not path.exists(), f"ALREADY_EXISTS: {{path}}"
    path.write_text((folder / "states").read_text())
elif action == "delete":
    if not (folder / "stuck").exists():
        path.unlink()
elif action == "ssh":
    assert path.read_text() == "ACTIVE"
    home = folder / "homes" / arguments[4]
    home.mkdir(parents=True, exist_ok=True)
    sys.exit(subprocess.run(["bash", "-c", flags["--command"]], env={{**os.environ, "HOME": str(home)}}).returncode)
"""

SYSTEMCTL = """#!/usr/bin/env bash
echo "systemctl $*" >>"$HOME/services"
case $1 in
is-active) [[ -e $HOME/active ]] && { [[ $2 == --quiet ]] || echo active; } ;;
restart) touch "$HOME/active" && "$HOME/$2/start.sh" ;;
stop) rm -f "$HOME/active" ;;
esac
"""

SUDO = """#!/usr/bin/env bash
if [[ $1 == tee ]]; then cat >"$HOME/$(basename "$2")"; else exec "$@"; fi
"""

KUBECTL = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"{folder}/calls"
case "$*" in
*' apply '*) cat >"{folder}/manifest" ;;
*' get pods '*--output=name) cat "{folder}/pods" 2>/dev/null || true ;;
esac
"""


def _program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def with_queued_resources(folder: Path, states: str = "WAITING_FOR_RESOURCES PROVISIONING ACTIVE") -> dict[str, str]:
    """The environment in which gcloud is a stand-in: a new request is seen in each of these states, then in the last.

    A file `broken` in the folder makes listing fail; `stuck` makes deleting do nothing.
    """
    (folder / "states").write_text(states)
    _program(folder / "bin" / "gcloud", GCLOUD.format(python=sys.executable, folder=str(folder)))
    _program(folder / "bin" / "systemctl", SYSTEMCTL)
    _program(folder / "bin" / "sudo", SUDO)
    _program(folder / "bin" / "journalctl", '#!/usr/bin/env bash\necho "log: $*"\n')
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "M2PO_POLL_S": "0.1"}


def with_cluster(folder: Path) -> dict[str, str]:
    """The environment in which gcloud and kubectl are stand-ins; the file `pods` in the folder holds what is left."""
    _program(folder / "bin" / "gcloud", f"#!/usr/bin/env bash\nprintf '%s\\n' \"$*\" >>'{folder}/calls'\n")
    _program(folder / "bin" / "kubectl", KUBECTL.replace("{folder}", str(folder)))
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}


def requests(folder: Path) -> dict[str, str]:
    """The requests that are there, and what is left of their states."""
    return {path.name: path.read_text() for path in sorted((folder / "requests").iterdir())}


def calls(folder: Path) -> list[str]:
    """What the stand-ins were called with."""
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []
