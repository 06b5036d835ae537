"""What is read from a server's answers, and what is refused; a real server is asked in test_remote.py."""

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from m2po_jax.config import ConfigError, UserError
from m2po_jax.config_server import ServerConfig
from m2po_jax.generation.handover import Handover
from m2po_jax.generation.remote import nearer
from m2po_jax.generation.server import Completion, Passing, Server, ServerError, completions_of, prompt_logprobs_of
from m2po_jax.models import huggingface
from tests import tiny_text
from tests.models import policies


def answer(*choices) -> dict:
    return {"choices": list(choices)}


def choice(tokens=(5, 7), logprobs=(-0.5, -1.5), index=0, reason="stop") -> dict:
    named = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": list(logprobs)}
    return {"index": index, "token_ids": list(tokens), "logprobs": named, "finish_reason": reason}


def test_responses_come_in_the_order_of_their_index():
    two = answer(choice(index=1, reason="length"), choice((3,), (-0.1,)))
    assert completions_of(two, 2) == [Completion([3], [-0.1], "stop"), Completion([5, 7], [-0.5, -1.5], "length")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, "gave 0 responses, not 1"),
        (answer(choice(), choice()), "gave 2 responses, not 1"),
        (answer(choice() | {"token_ids": None}), "gives no token ids"),
        (answer(choice() | {"logprobs": None}), "gives no log-probs"),
        (answer(choice(logprobs=(-0.5,))), "2 token ids and 1 log-probs for one response"),
        (answer(choice(logprobs=(-0.5, 0.1))), "no number of at most 0"),
        (answer(choice(logprobs=(-0.5, float("nan")))), "no number of at most 0"),
        (answer(choice(logprobs=(-0.5, None))), "no number of at most 0"),
        (answer(choice() | {"token_ids": [5, 8]}), "of other tokens"),
        (answer("a"), "have another form"),
        (answer(choice() | {"logprobs": [-1.0]}), "have another form"),
        (answer(choice(logprobs=("x", -1.0))), "have another form"),
        (answer(choice() | {"token_ids": [None, 1]}), "of other tokens"),
        (answer(choice() | {"finish_reason": ["x"]}), "have another form"),
    ],
)
def test_an_answer_that_training_cannot_use_is_refused(wrong, said):
    with pytest.raises(ServerError, match=said):
        completions_of(wrong, 1)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_response_that_was_broken_off_is_asked_for_again(reason):
    with pytest.raises(Passing):
        completions_of(answer(choice(reason=reason)), 1)


def test_log_probs_of_a_prompt():
    rows = [None, {"7": {"logprob": -2.0}}, {"9": {"logprob": -3.0}, "1": {"logprob": -0.1}}]
    given = prompt_logprobs_of(answer({"prompt_logprobs": rows}), [4, 7, 9])
    np.testing.assert_array_equal(given, [-2.0, -3.0])
    wrong = (None, rows[:2], [None, {"8": {"logprob": -2.0}}, rows[2]], [None, {"7": {"logprob": None}}, rows[2]])
    for answers in (*(answer({"prompt_logprobs": each}) for each in wrong), answer("a"), {"choices": {"a": 1}}, []):
        with pytest.raises(ServerError, match="no log-probs of a prompt"):
            prompt_logprobs_of(answers, [4, 7, 9])


def test_nobody_at_the_address_is_said_after_patience():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        server = Server(f"http://127.0.0.1:{taken.getsockname()[1]}/v1/", print, patience_s=0.5)
        with pytest.raises(ServerError, match=r"/v1/models does not answer \(.+\), and was asked for"):
            server.model()
        assert server.outages > 1
        server.close()


def test_half_an_answer_is_asked_for_again_and_a_refusal_is_said_at_once():
    """A socket that answers by hand: first with half an answer, then with a refusal."""
    half, refusal = b'200 OK\r\nContent-Length: 90\r\n\r\n{"data": ', b"404 No\r\nContent-Length: 4\r\n\r\ngone"
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            for each in (half, refusal):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 " + each)

        threading.Thread(target=serve, daemon=True).start()
        server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}", print, patience_s=20.0)
        with pytest.raises(ServerError, match="refuses with status 404: gone"):
            server.model()
        server.close()


def test_weights_clearly_nearer_to_others_are_noticed_and_precision_is_not():
    rng = np.random.default_rng(0)
    old = -np.abs(rng.normal(2.0, 1.0, 63))
    new, close = old + rng.normal(0.0, 0.1, 63), old + rng.normal(0.0, 0.001, 63)
    noise = rng.normal(0.0, 0.01, 63)
    assert nearer(old + noise, "new", {"old": old, "new": new}) == "old"
    assert nearer(new + noise, "new", {"old": old, "new": new}) is None
    assert nearer(old + noise, "close", {"old": old, "close": close}) is None, "one cannot tell them apart"


@pytest.fixture
def handover(tmp_path):
    def make(command=None):
        model = huggingface.read_config(tiny_text.save_model(tmp_path / f"model-{command}"))
        server = Server("http://127.0.0.1:9", print, patience_s=0.1)
        (tmp_path / "served").mkdir(exist_ok=True)
        return Handover(tmp_path / "served", model, str(tmp_path / f"model-{command}"), server, command)

    return make


def test_versions_lie_whole_and_current_points_to_the_newest(handover):
    given = handover()
    config = given._config
    trees = [policies.random_policy(None, seed, **tiny_text.MODEL)[1] for seed in range(4)]
    with given.alone():
        for version, params in enumerate(trees):
            out = given.write(version, f"{version}" * 64, params)
            assert given.current.resolve() == out.resolve()
            read = huggingface.load(given.current, config)
            np.testing.assert_array_equal(read["embedding"], params["embedding"])
        assert given.write(3, "3" * 64, trees[3]) == out
        left = sorted(each.name for each in given.directory.glob("0*"))
        assert left == ["0000002-222222222222", "0000003-333333333333"]
        with pytest.raises(UserError, match="each needs a server of its own"), given.alone():
            pass


def test_a_command_that_reloads_is_told_the_directory_and_its_failure_is_said(handover, tmp_path):
    handover(f"echo $M2PO_MODEL > {tmp_path}/told").load(tmp_path / "here")
    assert (tmp_path / "told").read_text().strip() == str(tmp_path / "here")
    with pytest.raises(ServerError, match="failed with exit code 3: no such service"):
        handover("echo no such service >&2; exit 3").load(tmp_path)


def test_a_command_may_leave_the_server_that_it_started(handover, tmp_path):
    since = time.monotonic()
    handover(f"sleep 60 & echo $! > {tmp_path}/pid").load(tmp_path)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    assert time.monotonic() - since < 30


@pytest.mark.parametrize("url", ["localhost:8000", "http://localhost:abc", "http://[::1", "http://", "http://a b/"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"server.url is .*: use a URL, as http://localhost:8000"):
        ServerConfig(url=url)


def test_the_default_directory_is_named_by_host_and_port_alone():
    server = Server("http://user:secret@tpu-1:8000/v1", print)
    assert server.address == "tpu-1-8000"
    server.close()
