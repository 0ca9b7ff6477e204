"""`python serve.py` as a user meets it: mistakes, signals, lost processes, models from the hub.

    pytest tests/test_cli.py

What a mistake, a signal or a lost process must come to: one clear line, the right exit code, and no
process left behind. `Server` fails every test that leaves one.
"""
import http.client
import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

import serve
from server import ROOT, Server, events, needs_proc, patience, wait_for

pytestmark = needs_proc

TINY = ROOT / "assets" / "tiny"
FAST = ("--threshold", 16)              # nothing to measure at start-up
PAIR = ("--nproc", 2, *FAST)
COMPLETIONS = "/v1/completions"
OFFLINE = {"HF_HUB_OFFLINE": "1"}


# --------------------------------------------------------------------------------------------------
# Mistakes: one line on stderr, nothing on stdout, exit code 2. {names} are made by `places`.

MISTAKES = {
    "misspelled option": ("--nproc 2 --thresold 16", "--thresold"),
    "unknown mode": ("--nproc 2 --mode fast", "--mode fast"),
    "unknown link": ("--nproc 2 --link carrier-pigeon", "--link carrier-pigeon"),
    "unknown dtype": ("--nproc 2 --dtype int3", "--dtype int3"),
    "sp 3 of 2 ranks": ("--nproc 2 --sp 3", r"sp 3\b.* 2 ranks"),
    "heads that 3 ranks cannot share": ("--nproc 3", r"3 ranks .*8 heads.* 1, 2, 4, 8$"),
    "port in use": ("--nproc 2 --port {port}", "--port {port}.*in use"),
    "no such model": ("--nproc 2 --model {nowhere}", "{nowhere}"),
    "model without config.json": ("--nproc 2 --model {bare}", "{bare}/config.json"),
    "config.json that is no JSON": ("--nproc 2 --model {garbled}", "{garbled}/config.json"),
    "weights cut short": ("--nproc 2 --model {cut}", "{cut}/model.safetensors"),
    "context too long": ("--nproc 2 --max-model-len 99999", "--max-model-len 99999.*4096"),
    "context beyond the pool": ("--nproc 2 --kv-blocks 4 --max-model-len 100",
                                "--max-model-len 100 .*--kv-blocks"),
    "unknown key of random": ("--nproc 2 --model random:dim=64,colour=7", "colour=7"),
    "not in the cache": ("--nproc 2 --model some-org/some-model", "some-org/some-model"),
}
SLIPS = {
    "shortened option": ("--thresh 16", "--thresh"),
    "text for a number": ("--nproc two", "two"),
    "text for a threshold": ("--threshold many", "--threshold many"),
    "no ranks": ("--nproc 0", "--nproc 0"),
    "no such port": ("--port 70000", "--port 70000"),
    "no seats": ("--max-seqs 0", "--max-seqs 0"),
    "no tokens": ("--max-step-tokens -1", "--max-step-tokens -1"),
    "no value": ("--mode", "--mode"),
    "a word too many": ("--explain yes", "yes"),
}
UNDER_TORCHRUN = ("misspelled option", "sp 3 of 2 ranks", "weights cut short")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Directories of models that are broken, a port in use, an empty cache."""
    root = tmp_path_factory.mktemp("places")
    made = {name: root / name for name in ("bare", "garbled", "cut")}
    for directory in made.values():
        shutil.copytree(TINY, directory)
    (made["bare"] / "config.json").unlink()
    (made["garbled"] / "config.json").write_text('{"architectures": ')
    weights = made["cut"] / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield {**made, "nowhere": root / "nowhere", "port": listener.getsockname()[1],
               "cache": root / "cache"}


def fails(words, places, torchrun=None, env=()):
    """Run this command line to its end; returns what it printed, its code, and how long its
    processes outlived its first word."""
    words = words.format(**places).split()
    words += [] if "--port" in words else ["--port", "0"]    # two run at a time
    if torchrun and "--nproc" in words:
        at = words.index("--nproc")
        del words[at:at + 2]
    env = {**OFFLINE, "HF_HOME": places["cache"], **dict(env)}
    with Server(*words, torchrun=torchrun, port=None, env=env) as server:
        code = server.wait()
        server.gone(30)
        ended = time.monotonic()
    first = [line.at for line in server.err if line.text.startswith("serve.py:")]
    return SimpleNamespace(code=code, out=server.out, err=server.err, text=server.text(),
                           lingered=ended - first[0] if first else None)


@pytest.fixture(scope="module")
def failures(places, request):
    """name -> what came of it, for the mistakes that this run tests: two at a time, because most of
    a mistake's time goes into the import of torch."""
    names = {item.callspec.params["name"] for item in request.session.items
             if getattr(item, "originalname", "") == "test_mistake"}
    with ThreadPoolExecutor(2) as pool:
        found = {name: pool.submit(fails, MISTAKES[name][0], places) for name in sorted(names)}
    return {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(failures, places, name):
    """Holds a mistake to one line on stderr that names it, exit code 2, and an end within 5 s."""
    failure, pattern = failures[name], MISTAKES[name][1].format(**places)
    assert failure.out == []
    assert len(failure.err) == 1, failure.text
    assert failure.err[0].text.startswith("serve.py: "), failure.text
    assert re.search(pattern, failure.err[0].text), failure.text
    assert failure.code == 2
    assert failure.lingered < 5 * patience()


@pytest.mark.parametrize("words, named", SLIPS.values(), ids=SLIPS)
def test_slip(words, named, capsys, monkeypatch):
    """Holds a command line that cannot be read to one line that names the value, and code 2, before
    any process is started."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(serve, "launch", lambda *arguments: pytest.fail("it starts ranks"))
    monkeypatch.setattr(serve, "serve", lambda *arguments: pytest.fail("it serves"))
    assert serve.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("serve.py: "), err
    assert named in err


@pytest.mark.parametrize("name", UNDER_TORCHRUN)
def test_mistake_under_torchrun(places, name, tmp_path):
    """Holds a mistake under torchrun to one line of ours, before torchrun's own report of the exit,
    and to an end within 5 s of it; also when rank 0, who says it, is the last to see it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '0':\n    time.sleep(1)\n")
    words, pattern = MISTAKES[name]
    failure = fails(words, places, torchrun=2, env={"PYTHONPATH": tmp_path})
    texts = [line.text for line in failure.err]
    ours = [i for i, text in enumerate(texts) if text.startswith("serve.py: ")]
    report = [i for i, text in enumerate(texts) if "Traceback" in text or "exitcode" in text]
    assert failure.out == []
    assert len(ours) == 1 and report and ours[0] < report[0], failure.text
    assert re.search(pattern.format(**places), texts[ours[0]]), failure.text
    assert not any("serve.py\", line" in text for text in texts), failure.text
    assert failure.code != 0
    assert failure.lingered < 5 * patience()


def test_help():
    """Holds --help to one page on stdout that has every option of the engine, and exit code 0."""
    with Server("--nproc", 2, "--help", port=None) as server:
        assert server.wait() == 0
        server.gone(5)
    text = server.text()
    assert server.err == []
    assert text.count("usage:") == 1
    for option in fields(serve.Options):
        assert f"--{option.name.replace('_', '-')}" in text


def test_two_servers_for_one_port():
    """Holds the second of two servers that start at once on one port to the line and the exit code
    of a port in use, although neither listened when both took it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Server(*PAIR, port=port) as one, Server(*PAIR, port=port) as other:
        pair = (one, other)
        wait_for(lambda: any(server.process.poll() is not None for server in pair), 10,
                 "one of the two gives up")
        late = one if one.process.poll() is not None else other
        kept = other if late is one else one
        assert late.wait() == 2 and len(late.err) == 1, late.text()
        assert f"--port {port}" in late.err[0].text
        kept.ready().complete("Once")
        assert kept.stop() == 0
        late.gone(5)


# --------------------------------------------------------------------------------------------------
# Ends


class Stream:
    """A stream of n tokens that has begun; `finish` reads what is left of it."""

    def __init__(self, server, tokens, **fields):
        body = {"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True,
                "stream": True, **fields}
        self.connection, self.response = server.open(COMPLETIONS, body)
        assert self.response.status == 200
        self.raw = self.response.read(200)

    def finish(self):
        """The payloads of all its events; the last one may have been cut off."""
        try:
            self.raw += self.response.read()
        except http.client.IncompleteRead as e:
            self.raw += e.partial
        except ConnectionError:
            pass
        finally:
            self.connection.close()
        end = self.raw.rindex(b"\n\n") + 2
        return events(self.raw[:end])


def quiet(server):
    """Assert that it printed what it serves, where, a line for each request, and nothing else."""
    assert server.err == [], server.text()
    said = [line.text.split()[0] for line in server.out]
    assert [word for word in said if word != "request"] == ["nanoshift:", "switch:", "ready"], (
        server.text())


@pytest.mark.parametrize("arguments, number", [
    (PAIR, signal.SIGTERM), (PAIR, signal.SIGINT), (FAST, signal.SIGTERM)],
    ids=["2 ranks, SIGTERM", "2 ranks, SIGINT", "1 rank, SIGTERM"])
def test_signal_when_idle(arguments, number):
    """Holds a server with nothing to do to end with code 0 and no word, with --nproc or not."""
    with Server(*arguments).ready() as server:
        assert server.complete("Once", max_tokens=2)["usage"]["completion_tokens"] == 2
        began = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - began < 10 * patience()
        quiet(server)


def test_signal_while_streaming():
    """Holds SIGTERM to let a stream run to its end, refuse what comes after it, and then end."""
    with Server(*PAIR, "--grace", 25).ready() as server:
        stream = Stream(server, 500)
        server.send_signal()
        wait_for(lambda: server.ask("/health") == (503, {"status": "the server is shutting down"}),
                 5, "it to close")
        status, reply = server.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        assert (status, reply["error"]["type"]) == (503, "server_error")
        *_, last, done = stream.finish()
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert server.wait(10) == 0
        server.gone(5)
        quiet(server)


def test_grace_runs_out():
    """Holds --grace to end a stream with an error event, and a whole answer with a 503, after as
    many seconds: not before, and not much later."""
    with Server(*PAIR, "--grace", 1.5).ready() as server, ThreadPoolExecutor(1) as pool:
        stream = Stream(server, 3000)
        whole = pool.submit(server.ask, COMPLETIONS, {
            "prompt": "Once", "max_tokens": 3000, "ignore_eos": True})
        time.sleep(0.5)
        began = time.monotonic()
        server.send_signal()
        *before, last = stream.finish()
        took = time.monotonic() - began
        assert json.loads(last)["error"]["type"] == "server_error"
        assert all("choices" in json.loads(one) for one in before)
        status, reply = whole.result(10)
        assert (status, reply["error"]["type"]) == (503, "server_error")
        assert 1.2 < took < 5 * patience()
        assert server.wait(10) == 0
        server.gone(5)
        quiet(server)


def test_second_signal_ends_at_once():
    """Holds a second Ctrl-C to end what the first one let run, far before --grace."""
    with Server(*PAIR, "--grace", 25).ready() as server:
        stream = Stream(server, 3000)
        server.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        began = time.monotonic()
        server.send_signal(signal.SIGINT)
        *_, last = stream.finish()
        assert json.loads(last)["error"]["type"] == "server_error"
        assert server.wait(10) == 0
        assert time.monotonic() - began < 5 * patience()
        server.gone(5)
        quiet(server)


def handles(pid, number):
    """Whether the process ignores or handles this signal, rather than ending by it."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(re.search(rf"{name}:\s*(\w+)", status)[1], 16) for name in ("SigIgn", "SigCgt")]
    return any(mask >> number - 1 & 1 for mask in masks)


def maps(server, library):
    """Whether the launcher has begun to load this library."""
    return library in Path(f"/proc/{server.process.pid}/maps").read_text()


MOMENTS = {"importing": lambda server: wait_for(lambda: maps(server, "libtorch"), 30, "torch"),
           "forking": lambda server: wait_for(lambda: len(server.ranks()) == 2, 30, "ranks"),
           "loading": lambda server: wait_for(
               lambda: len(server.ranks()) == 2 and handles(server.ranks()[0], signal.SIGTERM),
               30, "rank 0 to take signals into its own hands")}


@pytest.mark.parametrize("moment, number", [
    ("importing", signal.SIGINT), ("forking", signal.SIGTERM), ("loading", signal.SIGTERM),
    ("loading", signal.SIGINT)])
def test_signal_during_start(moment, number):
    """Holds a signal at any moment of the start to an end within 10 s, without a traceback."""
    with Server(*PAIR) as server:
        MOMENTS[moment](server)
        server.send_signal(number)
        server.wait(10)
        server.gone(5)
    assert "Traceback" not in server.text()


@pytest.mark.parametrize("moment", ["forking", "serving"])
def test_launcher_is_killed(moment):
    """Holds the ranks to end within 3 s of a launcher that could not tell them, be they in the
    middle of a stream or not yet connected to each other."""
    with Server(*PAIR) as server:
        if moment == "serving":
            Stream(server.ready(), 3000)
        else:
            MOMENTS[moment](server)
        server.send_signal(signal.SIGKILL)
        server.wait(5)
        server.gone(3)
    if moment == "serving":             # before that, torch complains that its store is gone
        assert "Traceback" not in server.text()
        assert len(server.err) <= 2, server.text()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_rank_is_killed(rank, busy):
    """Holds the loss of a rank to the end of all, a code that is not 0, at most a line of each that
    survived, and a client that is not left waiting."""
    with Server(*PAIR).ready() as server:
        stream = Stream(server, 3000) if busy else None
        os.kill(server.ranks()[rank], signal.SIGKILL)
        assert server.wait(5) != 0
        server.gone(5)
        if busy:
            assert stream.finish()[-1] != "[DONE]"
    said = [line.text for line in server.err]
    assert said.count(f"rank {rank} was ended by SIGKILL") == 1, server.text()
    assert len(said) <= 2, server.text()
    for text in said:
        assert text.startswith((f"rank {rank} was ended by SIGKILL",
                                f"serve.py: rank {1 - rank}: another rank is gone")), text


def test_torchrun():
    """Holds two ranks of torchrun to an answer, a stream that ends, no process after SIGTERM."""
    with Server(*FAST, torchrun=2).ready() as server:
        assert "2 ranks" in server.out[0].text
        assert server.complete("Once", max_tokens=3)["usage"]["completion_tokens"] == 3
        stream = Stream(server, 60)
        server.send_signal()
        assert stream.finish()[-1] == "[DONE]"
        server.wait(10)                 # torchrun's code, and its report on stderr, are its own
        server.gone(5)
    said = [line.text.split()[0] for line in server.out]
    assert said == ["nanoshift:", "switch:", "ready", "request", "request"], server.text()
    assert 'serve.py", line' not in server.text()


# --------------------------------------------------------------------------------------------------
# The hub


def test_model_from_the_hubs_cache(tmp_path):
    """Holds a hub id to the snapshot in the cache, offline, under the name that the user gave."""
    cached = tmp_path / "hub" / "models--some-org--tiny-model"
    snapshot = cached / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    for file in TINY.iterdir():
        (snapshot / file.name).symlink_to(file)
    with Server(*PAIR, "--model", "some-org/tiny-model",
                env={**OFFLINE, "HF_HOME": tmp_path}).ready() as server:
        status, models = server.ask("/v1/models")
        assert [model["id"] for model in models["data"]] == ["some-org/tiny-model"]
        reply = server.complete("Once", model="some-org/tiny-model")
        assert reply["model"] == "some-org/tiny-model"
        assert server.stop() == 0
        quiet(server)
