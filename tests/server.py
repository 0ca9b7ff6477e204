"""A server in processes of its own, watched from outside: for test_http.py and test_cli.py.

    with Server("--nproc", 2, "--threshold", 16).ready() as server:
        status, answer = server.ask("/v1/completions", {"prompt": "Once upon a time"})
        assert server.stop() == 0

Its processes, ranks that were orphaned too, are known by an entry in their environment. When the
`with` ends they are killed, and if there were any left, that fails the test.
"""
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JSON = {"content-type": "application/json"}
START = 60                              # seconds: ample for a start on a busy machine

needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(),
                                reason="these tests find the ranks through Linux's /proc")

Line = namedtuple("Line", "at text")    # when it was printed, by time.monotonic()


def patience():
    """How much more than on a quiet machine a time limit may be: others may be using this one."""
    return min(6.0, max(1.0, os.getloadavg()[0] / os.cpu_count()))


def wait_for(condition, seconds, what):
    """Poll until the condition holds, and return what it gave; AssertionError when it is late."""
    began = time.monotonic()
    while not (found := condition()):
        took = time.monotonic() - began
        assert took < seconds * patience(), f"{what}: not within {took:.0f} s"
        time.sleep(0.005)
    return found


class Server:
    """`python serve.py ARGS --port 0`, or that under torchrun, or with the checks of checks.py;
    `out` and `err` are its Lines."""

    def __init__(self, *args, torchrun=None, port=0, env=(), checked=False):
        self.mark = f"NANOSHIFT_TEST={uuid.uuid4().hex}"
        own = dict([self.mark.split("=")], OMP_WAIT_POLICY="PASSIVE")    # idle threads do not spin
        command = [sys.executable]
        if torchrun:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", torchrun]
        command += [ROOT / ("tests/checks.py" if checked else "serve.py"), *args]
        command += [] if port is None else ["--port", port]
        self.process = subprocess.Popen(
            list(map(str, command)), text=True, env={**os.environ, **own, **dict(env)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True)
        self.out, self.err = [], []
        self.readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in
                        ((self.process.stdout, self.out), (self.process.stderr, self.err))]
        for reader in self.readers:
            reader.start()

    def _read(self, pipe, lines):
        with pipe:
            for text in pipe:
                lines.append(Line(time.monotonic(), text.rstrip("\n")))

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        left = self.alive()
        self.kill()
        assert error or not left, f"processes left behind: {left}\n{self.text()}"

    def kill(self):
        """All of its processes, and nothing else."""
        while pids := self.alive():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.01)
        self.process.wait(10)
        for reader in self.readers:
            reader.join(10)

    # Its processes

    def alive(self):
        """The processes of this server that have not ended, orphans included."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    found.append(int(directory.name))
            except OSError:             # gone in between
                pass
        return sorted(found)

    def ranks(self):
        """The launcher's children, rank 0 first."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(map(int, task.read_text().split()))

    def send_signal(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, seconds=START):
        """Until the launcher ends; returns its exit code."""
        try:
            return self.process.wait(seconds * patience())
        except subprocess.TimeoutExpired as e:
            raise AssertionError(f"still there after {e.timeout:.0f} s:\n{self.text()}") from None

    def gone(self, seconds):
        """Until no process is left, and all that they printed is read."""
        wait_for(lambda: not self.alive(), seconds, "all processes gone")
        for reader in self.readers:
            reader.join(10)

    def stop(self, number=signal.SIGTERM):
        """End it as a user would; returns the exit code, once all is gone and read."""
        self.send_signal(number)
        code = self.wait(30)
        self.gone(5)
        return code

    # What it says

    def ready(self):
        """Until it serves."""
        def started():
            assert self.process.poll() is None, "it ended before it served"
            return [line.text for line in self.out if line.text.startswith("ready in")]
        try:
            self.url = wait_for(started, START, "ready")[0].split()[-1]
        except AssertionError as e:
            self.kill()
            raise AssertionError(f"{e}\n{self.text()}") from None
        self.address = self.url.removeprefix("http://")
        return self

    def text(self):
        """All that it printed."""
        return "\n".join(line.text for line in [*self.out, *self.err])

    def steps(self):
        """The engine's Lines, one for each step (--explain)."""
        return [line for line in list(self.out) if line.text.startswith("step ")]

    # HTTP. By hand, so that a test decides about every byte.

    def open(self, path, body=None, headers=JSON, method=None):
        """Send a request; returns (connection, response), the response yet to be read."""
        connection = self.send(path, body, headers, method)
        return connection, connection.getresponse()

    def send(self, path, body=None, headers=JSON, method=None):
        """Send a request; returns the connection."""
        connection = http.client.HTTPConnection(self.address, timeout=60 * patience())
        if not isinstance(body, (str, bytes, type(None))):
            body = json.dumps(body)
        data = body.encode() if isinstance(body, str) else body
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        return connection

    def ask(self, path, body=None, headers=JSON, method=None):
        """Send a request; returns (status, what JSON made of the answer)."""
        connection, response = self.open(path, body, headers, method)
        try:
            raw = response.read()
        finally:
            connection.close()
        try:
            return response.status, json.loads(raw)
        except ValueError:
            raise AssertionError(f"{response.status}, and not JSON: {raw[:300]!r}") from None

    def complete(self, prompt, **fields):
        """A completion that must succeed: greedy, and of max_tokens exactly, unless told so."""
        status, answer = self.ask("/v1/completions", {
            "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields})
        assert status == 200, answer
        return answer


def events(raw):
    """The payloads of a stream of server-sent events, each of which is one line `data: ...`."""
    *blocks, end = raw.decode().split("\n\n")
    assert end == "", f"the stream does not end with an empty line: {end!r}"
    for block in blocks:
        assert block.startswith("data: ") and "\n" not in block and "\r" not in block, repr(block)
    return [block.removeprefix("data: ") for block in blocks]
