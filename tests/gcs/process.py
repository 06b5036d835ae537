"""The store in memory as a process of its own, and the environment in which a program finds it."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUCKET = "m2po-tests"


class Gcs:
    """A running server."""

    def __init__(self, url: str, folder: Path):
        self.url = url
        account = folder / "account.json"
        keys = {"client_email": "", "private_key": "", "private_key_id": ""}
        account.write_text(json.dumps({"gcs_base_url": url, "disable_oauth": True, **keys}))
        self.environment = {
            "GOOGLE_SERVICE_ACCOUNT": str(account),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "abc",
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
        }
        """What a process needs for gs:// to mean this server: obstore, gcsfs, Orbax and TensorStore."""

    def bucket(self, name: str = BUCKET, forbidden: bool = False) -> str:
        """The URL of a bucket, which is made if need be."""
        self.control("bucket", name=name, forbidden=forbidden)
        return f"gs://{name}"

    def faults(self, **settings: float) -> None:
        """Set the shares of requests that go wrong, as `Faults.set` takes them; nothing given, nothing goes wrong."""
        self.control("faults", **settings)

    def trouble(self, share: float, seed: int = 0) -> None:
        """All kinds of faults, so that this share of the requests meets one; time-outs are rare, as they take long."""
        kinds = {"429": 0.3, "503": 0.3, "drop": 0.2, "truncate": 0.17, "hang": 0.03}
        self.faults(**{kind: part * share for kind, part in kinds.items()}, seed=seed, hang_s=3)

    def counts(self) -> dict[str, int]:
        """Requests by kind, bytes_in, bytes_out and faults since the last call."""
        return self.control("counts")

    def fill(self, pattern: str, count: int, bucket: str = BUCKET) -> None:
        """Put `count` small objects there at once, named by `pattern.format(number)`."""
        self.control("fill", bucket=bucket, pattern=pattern, count=count)

    def control(self, what: str, **settings: Any) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_control/{what}", json.dumps(settings).encode(), method="POST")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.load(answer)


@contextmanager
def gcs_server(folder: Path) -> Iterator[Gcs]:
    """A server of its own, with the bucket BUCKET, for as long as the block lasts."""
    command = [sys.executable, "-m", "tests.gcs.server", "--bucket", BUCKET]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        yield Gcs(process.stdout.readline().strip(), folder)
    finally:
        process.kill()
        process.communicate()
