"""How a generator reaches a server that draws its responses; of a generator, not of a run."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from m2po_jax.errors import require


@dataclass(frozen=True)
class ServerConfig:
    """A server that draws the responses in place of the decode engine: vLLM on TPU, GPU or CPU."""

    url: str | None = None
    """Where it is, as http://localhost:8000. A key that it asks for is read from OPENAI_API_KEY."""
    directory: str | None = None
    """Directory for the weights, which the server must see under the same path. Default: served/HOST-PORT."""
    reload: str | None = None
    """Shell command that makes the server load $M2PO_MODEL, as by a restart. Default: vLLM's own interface."""
    wait: float = 600.0
    """Seconds to wait for a server that does not answer, as while it starts."""
    tolerance: float = 0.05
    """Largest mean difference a token between its log-probs and ours; with both in float32 it is about 1e-5."""

    def __post_init__(self):
        require(
            self.url is None or _is_address(self.url),
            f"server.url is {self.url}: use a URL, as http://localhost:8000",
        )
        require(self.wait > 0.0, f"server.wait is {self.wait}: use a positive number of seconds")
        require(self.tolerance > 0.0, f"server.tolerance is {self.tolerance}: use a positive number")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not set(url) & set(" \t\n")
        )
    except ValueError:  # a port that is none
        return False
