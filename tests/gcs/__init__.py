"""A server that speaks Google Cloud Storage in a process of its own, with faults to order, for tests and benchmarks."""

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUCKET = "m2po-tests"


@dataclass(frozen=True)
class Serving:
    """A running server."""

    url: str
    environment: dict[str, str]
    """What leads the package's libraries to it, as variables of the environment that they read anyway."""
    bucket: str = BUCKET

    def faults(self, **settings: Any) -> None:
        """Set `share`, `kinds`, `hang_s`, `seed`, `away_s`, or `reset` the counts."""
        self._control(json.dumps(settings).encode())

    def requests(self) -> dict[str, int]:
        """How many requests of each kind there were, and bytes."""
        return json.loads(self._control(None))

    def _control(self, body: bytes | None) -> bytes:
        with urllib.request.urlopen(f"{self.url}/_control", body, timeout=30) as answer:
            return answer.read()


@contextlib.contextmanager
def serving(*buckets: str) -> Iterator[Serving]:
    """Start a server with these buckets beside the usual one, and stop it in the end."""
    command = [sys.executable, "-m", "tests.gcs.server", "--bucket", BUCKET, *buckets]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        with tempfile.TemporaryDirectory() as folder:
            account = Path(folder) / "account.json"
            empty = {"private_key": "", "private_key_id": "", "client_email": ""}
            account.write_text(json.dumps({"gcs_base_url": url, "disable_oauth": True, **empty}))
            yield Serving(
                url,
                {
                    "GOOGLE_SERVICE_ACCOUNT": str(account),
                    "STORAGE_EMULATOR_HOST": url,
                    "TENSORSTORE_GCS_HTTP_URL": url,
                    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "test",
                },
            )
    finally:
        process.kill()
        process.communicate()
