"""A client of an OpenAI-compatible server of completions: token ids in, token ids and their log-probs out.

It speaks to vLLM, on TPU, GPU or CPU, and to what answers as vLLM does. Requests wait on a thread of their own, so that
many are under way at once, and none keeps the process from ending.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from m2po_jax.config import UserError
from m2po_jax.generation.polling import Poll

CONNECTIONS = 256
"""Requests under way at once, each for all samples of a prompt; the server queues what it has no room for."""
KEY = "OPENAI_API_KEY"
"""Environment variable with the key that a server started with `--api-key` asks for."""
_CONNECT_S, _ANSWER_S = 10.0, 900.0
_SAY_AFTER_S, _PAUSES = 10.0, Poll(first_s=0.2, most_s=5.0)
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_ENDED = frozenset({"stop", "length"})


class Completion(NamedTuple):
    """One response."""

    tokens: list[int]
    """The stop token included, if it ended with one."""
    logprobs: list[float]
    """A float for each token, as the server gives them."""
    finish_reason: str
    """`stop` or `length`."""


class ServerError(UserError):
    """The server cannot be used as it is; to ask again does not help."""


class Passing(Exception):
    """An answer that another attempt may mend."""


class Server:
    """The server at a URL. What fails in passing is asked again, for `patience_s`; anything else is a ServerError."""

    def __init__(self, url: str, say: Callable[[str], None], patience_s: float = 600.0):
        """Asks nothing yet. `say` takes one line where the server lets itself be waited for."""
        import httpx2

        self.url = url.rstrip("/").removesuffix("/v1")
        self.outages = 0
        """How often it could not be reached; it may have started again since, with other weights."""
        self._say, self._patience_s, self._told = say, patience_s, False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        key = os.environ.get(KEY)
        self._client = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            follow_redirects=True,
            timeout=httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=CONNECTIONS),
        )
        self._room = asyncio.Semaphore(CONNECTIONS)

    @property
    def address(self) -> str:
        """Host and port, as a name for files."""
        parts = urlsplit(self.url)
        return "-".join([*(parts.hostname or "").split(":"), *([str(parts.port)] if parts.port else [])])

    def model(self) -> str:
        """Name of the model that it serves."""
        return self._wait(self._asked("GET", "/v1/models", None, lambda text: _model(_json(text))))

    def complete(self, body: dict[str, Any]) -> "Future[list[Completion]]":
        """Ask `/v1/completions` with a prompt of token ids; the result has `n` responses in order."""
        told = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0, "stream": False}
        count = int(body.get("n", 1))
        return self._begun(
            self._asked("POST", "/v1/completions", body | told, lambda text: completions_of(_json(text), count))
        )

    def score(self, model: str, tokens: list[int]) -> np.ndarray:
        """Log-probs of the tokens after the first, each given those before it, float64 (len(tokens) - 1,)."""
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return self._wait(
            self._asked("POST", "/v1/completions", body, lambda text: prompt_logprobs_of(_json(text), tokens))
        )

    def post(self, path: str, body: dict[str, Any], hint: str) -> None:
        """Ask for something to be done, and wait until it is; `hint` is said where the server does not know of it."""
        try:
            self._wait(self._asked("POST", path, body, lambda _: None, passing=_PASSING - {500}))
        except ServerError as error:
            raise ServerError(f"{error}: {hint}") from error

    def close(self) -> None:
        """Leave whatever is under way; nothing can be asked any more."""
        if self._loop.is_closed():
            return
        self._wait(self._left())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _left(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    def _begun(self, asked: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(asked, self._loop)

    def _wait(self, asked: Coroutine[Any, Any, Any]) -> Any:
        return self._begun(asked).result()

    async def _asked(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        read: Callable[[str], Any],
        passing: frozenset[int] = _PASSING,
    ) -> Any:
        """The answer as `read` reads it, asked again with pauses that double while it fails in passing."""
        import httpx2

        since = time.monotonic()
        for pause_s in _PAUSES.waits():
            try:
                async with self._room:
                    answer = await self._client.request(method, path, json=body)
                if answer.status_code in passing:
                    raise Passing(f"status {answer.status_code}: {said(answer.text)}")
                if answer.is_error:
                    raise ServerError(f"{self.url}{path} refuses with status {answer.status_code}: {said(answer.text)}")
                return read(answer.text)
            except httpx2.HTTPError as error:
                self.outages += 1
                reason = str(error) or type(error).__name__
            except Passing as error:
                reason = str(error)
            waited_s = time.monotonic() - since
            if waited_s > self._patience_s:
                raise ServerError(f"{self.url}{path} does not answer ({reason}), and was asked for {waited_s:.0f} s")
            if waited_s > _SAY_AFTER_S and not self._told:
                self._told = True
                self._say(f"waiting for {self.url} ({reason}), for {self._patience_s:.0f} s at most")
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses have no end")


def completions_of(answer: Any, count: int) -> list[Completion]:
    """The responses of an answer of `/v1/completions`, in order.

    Raises:
        Passing: one was broken off.
        ServerError: it does not have what training needs: token ids, and a log-prob for each.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != count:
        given = len(choices) if isinstance(choices, list) else 0
        raise ServerError(f"the server gave {given} responses, not {count}: is it vLLM or alike?")
    try:
        return [_completion(choice) for choice in sorted(choices, key=lambda choice: choice.get("index", 0))]
    except (AttributeError, TypeError, ValueError) as error:
        raise ServerError(f"the server's responses have another form than vLLM's: {error}") from error


def _completion(choice: dict[str, Any]) -> Completion:
    reason = choice.get("finish_reason")
    if reason not in _ENDED:
        raise Passing(f"a response was broken off ({reason})")
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(tokens, list) or not tokens:
        raise ServerError("the server gives no token ids (return_token_ids): use vLLM 0.10.2 or newer")
    if not isinstance(logprobs, list) or not logprobs:
        raise ServerError("the server gives no log-probs: start it with its log-probs allowed (vLLM: --max-logprobs)")
    if len(tokens) != len(logprobs):
        raise ServerError(f"the server gave {len(tokens)} token ids and {len(logprobs)} log-probs for one response")
    named = (choice.get("logprobs") or {}).get("tokens") or []
    if named and named != [f"token_id:{token}" for token in tokens]:
        raise ServerError("the server's log-probs are of other tokens than its token ids")
    if any(value is None or not np.isfinite(value) or value > 0.0 for value in logprobs):
        raise ServerError("the server gave a log-prob that is no number of at most 0")
    return Completion(list(map(int, tokens)), list(map(float, logprobs)), reason)


def prompt_logprobs_of(answer: Any, tokens: list[int]) -> np.ndarray:
    """Log-probs of a prompt's tokens after the first, float64; ServerError if the server does not give them."""
    try:
        rows = answer["choices"][0]["prompt_logprobs"]
        given = [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:], strict=True)]
        values = np.array(given, np.float64)
        if not np.isfinite(values).all():
            raise ValueError("a log-prob is no number")
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError("the server gives no log-probs of a prompt (prompt_logprobs): use vLLM") from error
    return values


def _model(answer: Any) -> str:
    try:
        listed = [str(model["id"]) for model in answer["data"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ServerError("the server does not list its models at /v1/models: is it OpenAI-compatible?") from error
    if not listed:
        raise Passing("it serves no model")
    return listed[0]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError(f"the server answers what is no JSON: {said(text)}") from error


def said(text: str) -> str:
    """What a server says of its error, in a line."""
    return " ".join(text.split())[:200] or "nothing"
