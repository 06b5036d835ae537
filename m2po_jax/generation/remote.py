"""Sampling on a server: the decode engine's place taken by vLLM, or what answers as it does.

Three things are verified and none is assumed. Which weights the server has: by the log-probs of a probe, which are
computed here too, whenever it was given others or could not be reached for a moment. That its log-probs are of the
distribution that it samples from, at the sampling temperature and before truncation: by asking for a greedy token. And
each unit: by the log-probs of a response's first tokens, computed here.

Responses are drawn with the server's own random numbers, so a unit asked for twice is another one. No seeds are sent:
backends differ in whether they take them, and vLLM's on CPUs ends at some.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from m2po_jax.config import SamplingConfig
from m2po_jax.generation.handover import Handover
from m2po_jax.generation.sampler import Responses, Work, graded
from m2po_jax.generation.scoring import score
from m2po_jax.generation.server import Completion, Server, ServerError
from m2po_jax.models import Transformer
from m2po_jax.tasks import Problem, Task, right_padded

PROBE_TOKENS = 64
"""Tokens, of the run's own prompts, whose log-probs tell versions apart."""
CHECKED_TOKENS = 16
"""First tokens of a response of each unit, whose log-probs are computed here as well."""
_SETTLES_S = 5.0
_ATTEMPTS = 5


class Policy(NamedTuple):
    """A version of the run's policy."""

    version: int
    digest: str
    params: Any


@dataclass
class Asked:
    """A unit that the server was asked for."""

    policy: Policy
    prompts: list[list[int]]
    bodies: list[dict[str, Any]]
    futures: list[Future[list[Completion]]]
    outages: int
    """Of the server, before it was asked."""
    made: list[Completion] | None = None
    """The responses in order, once they are there."""
    verified: bool = False
    """Whether the server had the policy after it had given them, and was there all the time."""


class RemoteSampler:
    """Draws responses from the policy that a server has, after giving it that policy."""

    def __init__(
        self,
        task: Task,
        model: Transformer,
        config: SamplingConfig,
        server: Server,
        handover: Handover,
        say: Callable[[str], None],
        tolerance: float,
        restarts_s: float | None = None,
    ):
        """`tolerance` is of the mean difference of log-probs, a token.

        `restarts_s` is how long a server may take until it has the weights that it was told to load.
        """
        self.task, self.model, self.config = task, model, config
        self.work = Work()
        """Of everything that was collected; a server does not tell of its slots."""
        self._server, self._handover, self._say = server, handover, say
        self._tolerance, self._restarts_s = tolerance, restarts_s or _SETTLES_S
        self._served: Policy | None = None
        self._outages = -1  # of the server when it was found to have that policy
        self._name = ""
        self._expected: dict[str, np.ndarray] = {}
        self._waiting: list[Asked] = []
        self._since = 0.0
        self._probe = self._probe_tokens()

    def prepare(self, version: int, digest: str, params: Any) -> None:
        """Have the server load these weights, unless it has them, and verify that it did.

        Raises:
            ServerError: it does not, or its log-probs are of no use.
        """
        known = self._served is not None and self._served.digest == digest
        if not known or self._outages != self._server.outages:
            self._give(Policy(version, digest, params))

    def dispatch(self, params: Any, problems: Sequence[Problem], keys: Array, samples_per_prompt: int) -> Asked:
        """Ask for `samples_per_prompt` responses to each problem, of what was prepared, and return at once."""
        prompts = [self.task.prompt_tokens(problem) for problem in problems]
        self.model.require_room(max(map(len, prompts)) + self.config.max_new_tokens)
        assert self._served is not None, "prepare comes first"
        drawn = {"n": samples_per_prompt, "max_tokens": self.config.max_new_tokens}
        bodies = [self._body(prompt) | drawn for prompt in prompts]
        if not self._waiting:
            self._since = time.perf_counter()
        asked = self._asked(self._served, prompts, bodies)
        self._waiting.append(asked)
        return asked

    def collect(self, asked: Asked, problems: Sequence[Problem]) -> Responses:
        """Wait for `dispatch`'s responses, verify, decode and grade them; what is not of these weights is asked again.

        Raises:
            ServerError: it is not of these weights once more.
        """
        made = self._settled(asked)
        difference = self._difference(asked, made[0])
        if difference > self._tolerance or not asked.verified:
            self._say(f"{self._server.url} was away, or given other weights: the unit is asked for once more")
            made = self._again(asked)
            difference = self._difference(asked, made[0])
        if difference > self._tolerance:
            raise ServerError(
                f"log-probs of responses of {self._server.url} differ from those of the version it was given by"
                f" {difference:.3f} a token (--server.tolerance allows {self._tolerance}): is its precision another, or"
                " does it keep prefixes of other weights?"
            )
        self._waiting.remove(asked)
        now = time.perf_counter()
        tokens = sum(len(each.tokens) for each in made)
        self.work = Work(self.work.tokens + tokens, 0, self.work.seconds + now - self._since)
        self._since = now
        return self._responses(made, problems)

    def close(self) -> None:
        """Leave whatever the server is still asked for."""
        self._server.close()

    def _again(self, asked: Asked) -> list[Completion]:
        """Ask for a unit anew, under its weights, until the server stays there meanwhile; then what it had returns."""
        served = self._served
        for _ in range(_ATTEMPTS):
            self._give(asked.policy)
            anew = self._asked(asked.policy, asked.prompts, asked.bodies)
            made = self._settled(anew)
            if anew.verified:
                break
        else:
            raise ServerError(
                f"{self._server.url} goes away, or loses the weights it was given, {_ATTEMPTS} times a unit"
            )
        if served is not None and served.digest != asked.policy.digest:
            self._give(served)
        return made

    def _asked(self, policy: Policy, prompts: list[list[int]], bodies: list[dict[str, Any]]) -> Asked:
        outages = self._server.outages
        return Asked(policy, prompts, bodies, [self._server.complete(body) for body in bodies], outages)

    def _settled(self, asked: Asked) -> list[Completion]:
        """Wait for a unit's responses, and see whether the server has its policy still."""
        if asked.made is None:
            asked.made = [each for future in asked.futures for each in future.result()]
            difference, other = self._compared(asked.policy.digest)
            stayed = asked.outages == self._server.outages
            asked.verified = stayed and other is None and difference <= self._tolerance
        return asked.made

    def _body(self, prompt: list[int]) -> dict[str, Any]:
        """A request for one response; what a model's own generation_config.json would change is all given."""
        config = self.config
        neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return neutral | {
            "model": self._name,
            "prompt": prompt,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k or 0,
            "stop_token_ids": list(self.task.tokenizer.stop_ids),
        }

    def _give(self, policy: Policy) -> None:
        """Have the server load a policy, once it has answered what it was asked before, and verify that it did."""
        for asked in self._waiting:
            self._settled(asked)
        since = time.perf_counter()
        version, digest, params = policy
        directory = self._handover.write(version, digest, params)
        if digest not in self._expected:
            self._expected[digest] = self._scored(params, self._probe[:1], self._probe[1:], 1.0)
        if self._served is None:
            self._say(f"asks {self._server.url} for responses; a server may be started with {self._handover.current}")
        self._handover.load(directory)
        self._name = self._server.model()
        outages, difference = self._verified(version, digest)
        if self._outages != outages:
            self._refuse_other_logprobs(params)
        self._served, self._outages = policy, outages
        taken = time.perf_counter() - since
        self._say(f"{self._server.url} has version {version} (log-probs to {difference:.1e}), after {taken:.1f} s")

    def _verified(self, version: int, digest: str) -> tuple[int, float]:
        """Wait until the probe is that of the version; gives the outages until then and the difference."""
        until = time.monotonic() + self._restarts_s
        while True:
            outages = self._server.outages
            difference, other = self._compared(digest)
            if difference <= self._tolerance and other is None and outages == self._server.outages:
                return outages, difference
            if time.monotonic() > until:
                why = "are those of weights it had before" if other else f"differ by {difference:.3f} a token"
                raise ServerError(
                    f"{self._server.url} does not have version {version}, which it was given: the log-probs of a probe"
                    f" {why} (--server.tolerance allows {self._tolerance}). {self._handover.advice}"
                )
            time.sleep(0.5)

    def _compared(self, digest: str) -> tuple[float, str | None]:
        """Mean difference of the probe's log-probs to those expected, a token, and what weights they are nearer to."""
        given = self._server.score(self._name, self._probe)
        return float(np.abs(given - self._expected[digest]).mean()), nearer(given, digest, self._expected)

    def _refuse_other_logprobs(self, params: Any) -> None:
        """Refuse a server whose log-probs are not of the softmax at the sampling temperature, before truncation."""
        config, prompt = self.config, self._probe[: len(self._probe) // 2]
        body = self._body(prompt) | {"n": 1, "max_tokens": 4}
        (greedy,) = self._server.complete(body | {"top_k": 1, "temperature": 1.0}).result()
        processed = not any(greedy.logprobs) and bool(self._scored(params, prompt, greedy.tokens, 1.0).min() < -1e-4)
        truncated = config.top_p < 1.0 or config.top_k is not None
        url = self._server.url
        if processed and truncated:
            raise ServerError(
                f"{url} gives log-probs after truncation, but sampling.top_p or top_k cuts the distribution: start vLLM"
                " with --logprobs-mode raw_logprobs and sample at temperature 1, or use top_p 1 and no top_k"
            )
        if not processed and config.temperature != 1.0:
            raise ServerError(
                f"{url} gives log-probs at temperature 1, not at sampling.temperature {config.temperature}: start vLLM"
                " with --logprobs-mode processed_logprobs, or sample at temperature 1"
            )

    def _difference(self, asked: Asked, first: Completion) -> float:
        """Mean difference of log-probs of the unit's first response, over its first tokens."""
        tokens = first.tokens[:CHECKED_TOKENS]
        ours = self._scored(asked.policy.params, asked.prompts[0], tokens, self.config.temperature)
        return float(np.abs(ours - np.array(first.logprobs[:CHECKED_TOKENS])).mean())

    def _scored(self, params: Any, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
        """Log-probs of tokens after a prompt by our forward pass, float64 (len(tokens),)."""
        widths = (max(len(prompt), self.task.max_prompt_tokens), max(len(tokens), CHECKED_TOKENS))
        return score(self.model, params, [prompt], [tokens], widths, temperature)[0, : len(tokens)].astype(np.float64)

    def _probe_tokens(self) -> list[int]:
        """The run's first prompts, one after the other."""
        problems = self.task.draw(PROBE_TOKENS, (0,))
        tokens = [token for problem in problems for token in self.task.prompt_tokens(problem)]
        return tokens[: min(PROBE_TOKENS, self.task.max_prompt_tokens + self.config.max_new_tokens)]

    def _responses(self, made: list[Completion], problems: Sequence[Problem]) -> Responses:
        width = self.config.max_new_tokens
        tokens, mask = right_padded([each.tokens for each in made], width, self.task.tokenizer.pad_id)
        logprobs = np.zeros(tokens.shape, np.float32)
        logprobs[mask] = np.concatenate([each.logprobs for each in made])
        stopped = [each.finish_reason == "stop" for each in made]
        return graded(self.task, problems, tokens, logprobs, mask.sum(axis=1, dtype=np.int32), stopped)


def nearer(given: np.ndarray, digest: str, expected: dict[str, np.ndarray]) -> str | None:
    """Digest of other weights whose log-probs are clearly nearer to those given, or None.

    Clearly: they lie closer to what was given than to those of `digest`, so that it is no matter of precision.
    """
    apart = {each: _rms(given - values) for each, values in expected.items()}
    for each, values in expected.items():
        if apart[each] < apart[digest] and apart[each] < _rms(values - expected[digest]):
            return each
    return None


def _rms(differences: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(differences))))
