"""What must happen when things go wrong: too much to do, no key, lost ranks, clients that leave.

    pytest tests/test_faults.py

The faults themselves are in stress.py, which can repeat them and makes a table. A fault of a server
has one of its own, whose `with` fails if a process of it is left.
"""
import json
import re
import socket
from contextlib import closing

import openai
import pytest

import stress
from server import JSON, Server, needs_proc, patience, wait_for
from stress import COMPLETIONS, LONG, NARROW, PROMPT, leaves, loads, metrics

pytestmark = needs_proc


def client_of(server, key):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60,
                         http_client=openai.DefaultHttpxClient(trust_env=False))


# --------------------------------------------------------------------------------------------------
# Faults: what clients see, the exit code, and how soon

LOST = "the engine has ended: a rank is lost, or failed"
STUCK = "no collective has returned for 2 s"
OUTCOMES = {                            # pattern in what was seen; seconds
    "rank killed": (f"stream: {LOST}; whole: 503; exit code 137", 3),
    "rank 0 killed": ("stream: cut off; whole: cut off; exit code 137", 3),
    "rank stuck": (f"{STUCK}.*whole: 503; exit code 1", 6),
    "rank stopped for 2 s": ("whole: 200; exit code 0", 20),
    "SIGTERM under load": (r"new: 503; streams: \[DONE\]; exit code 0", 25),
    "SIGTERM twice": ("streams: the server is shutting down; exit code 0", 4)}


@pytest.mark.parametrize("fault", OUTCOMES)
def test_fault_of_the_server(fault):
    """Holds a fault to what each client is told, to the exit code, and to an end in time."""
    pattern, seconds = OUTCOMES[fault]
    seen, took = stress.SERVER_FAULTS[fault](2)
    assert re.search(pattern, seen), seen
    assert took < seconds * patience(), f"{took:.1f} s"


@pytest.fixture(scope="module")
def narrow():
    with Server("--nproc", 2, *NARROW).ready() as server:
        yield server
        assert server.stop() == 0
        assert server.err == []


@pytest.mark.parametrize("fault", stress.CLIENT_FAULTS)
def test_client_that_leaves(narrow, fault):
    """Holds the engine to forget a client that has gone, whatever its request was doing: no
    request and no block is left, and the next one gets its answer."""
    before = narrow.complete(PROMPT)["choices"]
    seen, _ = leaves(narrow, stress.CLIENT_FAULTS[fault])
    assert seen == {"leaves its stream": "part of a stream",
                    "half-closes": "connection closed"}.get(fault, "nothing")
    assert narrow.complete(PROMPT)["choices"] == before


def test_line_of_a_request(narrow):
    """Holds the log to one line for a request: how many tokens, how fast, why it ended."""
    begun = len(narrow.out)
    answer = narrow.complete(PROMPT, n=2, max_tokens=7)
    lines = wait_for(lambda: len(narrow.out) == begun + 2 and narrow.out[begun:], 5, "two lines")
    for index, line in enumerate(lines):
        head, name, *pairs = line.text.split()
        found = dict(pair.split("=") for pair in pairs)
        assert (head, name) == ("request", f"{answer['id']}/{index}")
        assert found["prompt_tokens"] == str(answer["usage"]["prompt_tokens"])
        assert (found["completion_tokens"], found["finish"]) == ("7", "length")
        assert 0 < float(found["tpot_ms"]) and 0 < float(found["ttft_ms"])


def test_metrics_count(narrow):
    """Holds each counter of /metrics to what one request adds to it."""
    narrow.complete(PROMPT, max_tokens=2)                # has a prefix to be found
    before = metrics(narrow)
    answer = narrow.complete([*range(100, 140)], max_tokens=5)
    wait_for(lambda: metrics(narrow) != before, 5, "the counters")
    after = metrics(narrow)
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    assert added["prompt_tokens_total"] == answer["usage"]["prompt_tokens"] == 40
    assert added["generation_tokens_total"] == 5
    assert added['request_success_total{finished_reason="length"}'] == 1
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert added[f"{name}_seconds_count"] == 1 and added[f"{name}_seconds_sum"] > 0
    steps = sum(value for name, value in added.items() if name.startswith("steps_total"))
    tokens = sum(value for name, value in added.items() if name.startswith("step_tokens_total"))
    assert (steps, tokens) == (3 + 4, 40 + 4)            # the prompt in steps of 16 tokens
    assert added["prefix_cache_queries_total"] == 40 and added["prefix_cache_hits_total"] == 0
    calls = added['collective_calls_total{op="all_reduce",what="o"}']
    assert calls > 0 and calls % steps == 0
    for kind in ("bytes", "seconds"):
        assert added[f'collective_{kind}_total{{op="all_reduce",what="o"}}'] > 0
    narrow.complete([*range(100, 140)], max_tokens=5)
    assert metrics(narrow)["prefix_cache_hits_total"] == after["prefix_cache_hits_total"] + 32


def test_metrics_of_both_modes():
    """Holds steps, tokens and switches to the modes that ran: a prompt in base mode, its answer in
    shift mode, twice."""
    with Server("--nproc", 2, "--threshold", 4, "--quiet", "--host", "0.0.0.0").ready() as server:
        for first in (5, 6):
            server.complete([first] * 20, max_tokens=3)
        found = metrics(server)
        assert found['steps_total{mode="base"}'] == 2 and found['steps_total{mode="shift"}'] == 4
        assert found['step_tokens_total{mode="base"}'] == 40
        assert found['step_tokens_total{mode="shift"}'] == 4
        assert found["switches_total"] == 3
        slow_reader(server)
        assert server.stop() == 0
        assert [line.text.split()[0] for line in server.out] == ["nanoshift:", "switch:", "ready"]
        [warning] = server.err
        assert "--api-key" in warning.text and "0.0.0.0" in warning.text


def slow_reader(server):
    """Holds the memory of a stream that nobody reads to a bound: it is cancelled, and what is sent
    ends with an error event."""
    with closing(socket.socket()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        body = json.dumps({**LONG, "stream": True, "n": 100})
        connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                           f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                           f"{body}".encode())
        cancelled = 'request_success_total{finished_reason="cancelled"}'
        wait_for(lambda: metrics(server).get(cancelled) == 100, 30, "it is cancelled")
        assert loads(server) == (0, 0)
        connection.settimeout(20)
        raw = b""
        while piece := connection.recv(1 << 20):
            raw = (raw + piece)[-1000:]
    assert b"does not read" in raw and b"[DONE]" not in raw


# --------------------------------------------------------------------------------------------------
# Overload and keys

KEYS = "correct-horse", "battery-staple"


@pytest.fixture(scope="module")
def guarded():
    with Server("--max-seqs", 1, "--max-waiting", 2, "--threshold", 16, "--host", "0.0.0.0",
                *(word for key in KEYS for word in ("--api-key", key))).ready() as server:
        yield server
        assert server.stop() == 0
        assert server.err == [], "with a key there is nothing to warn of"
        assert not any(key in server.text() for key in KEYS), "a key in the log"


@pytest.mark.parametrize("key", ["", "correct", "correct-horse2", "Correct-horse", "horsé"])
def test_wrong_key(guarded, key):
    """Holds every route but /health to a 401 without one of the keys, be it there or not."""
    given = {"authorization": f"Bearer {key}".encode()} if key else {}
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (COMPLETIONS, b"["), ("/v1/models", None),
                       ("/metrics", None), ("/docs", None), ("/openapi.json", None),
                       ("/v1/nothing", None), ("//health", None), ("/health/", None)):
        status, reply = guarded.ask(path, body, {**JSON, **given})
        assert (status, reply["error"]["code"]) == (401, "invalid_api_key"), path
    assert guarded.ask("/health", headers=given) == (200, {"status": "ok"})


def test_right_key(guarded):
    """Holds each of the keys to an answer, and OpenAI's client to its exception for a wrong one."""
    for key in KEYS:
        with client_of(guarded, key) as client:
            assert client.completions.create(model="assets/tiny", prompt="a", max_tokens=1).choices
    with client_of(guarded, "guess") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_overload(guarded):
    """Holds one request more than may wait to a 503 that says when to come again, and the server
    to take new ones once there is room."""
    headers = {**JSON, "authorization": f"Bearer {KEYS[0]}"}
    held = [guarded.open(COMPLETIONS, {**LONG, "stream": True}, headers) for _ in range(3)]
    connection, response = guarded.open(COMPLETIONS, {"prompt": "a"}, headers)
    with closing(connection):
        assert response.status == 503 and int(response.getheader("retry-after")) > 0
        assert "too many" in response.read().decode()
    with client_of(guarded, KEYS[0]) as client:
        with pytest.raises(openai.InternalServerError, match="too many"):
            client.completions.create(model="assets/tiny", prompt="a", max_tokens=1)
        with pytest.raises(openai.BadRequestError, match="too many"):        # there never is room
            client.completions.create(model="assets/tiny", prompt="a", max_tokens=1, n=4)
        for connection, response in held:
            response.close()
            connection.close()
        wait_for(lambda: guarded.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers)[0]
                 == 200, 5, "room")


def test_key_from_nowhere():
    """Holds an empty key to a server that nobody may use, not to one that all may."""
    with Server("--threshold", 16, "--api-key", "").ready() as server:
        for given in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer "}):
            assert server.ask("/v1/models", headers=given)[0] == 401
        assert server.stop() == 0
