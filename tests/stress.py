"""Faults, hostile input and load, from outside the server. pytest does not collect this file.

    python tests/stress.py faults --times 20 --ranks 2     each fault: what the client saw, how soon
    python tests/stress.py schemathesis --examples 2000    requests made up from the OpenAPI
    python tests/stress.py hostile --count 10000           random and hostile bodies, by status
    python tests/stress.py soak --minutes 20 --ranks 8     mixed load with cancellations
    python tests/stress.py streams --count 256             as many streams at once

schemathesis needs `pip install schemathesis`. test_faults.py runs every fault once.
"""
import argparse
import asyncio
import collections
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from server import JSON, Server, wait_for

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time"
LONG = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
# Few tokens a step and few seats: a prompt takes long to compute, and the third request waits.
NARROW = "--threshold", 16, "--max-seqs", 2, "--max-step-tokens", 16


def metrics(server):
    """{name or name{labels}: value} of /metrics, without the prefix."""
    connection, response = server.open("/metrics")
    with closing(connection):
        assert response.status == 200
        lines = [line for line in response.read().decode().splitlines() if line[0] != "#"]
    return {name.removeprefix("nanoshift:"): float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines)}


def loads(server):
    """(running, waiting) requests, as /metrics has them."""
    found = metrics(server)
    return int(found["num_requests_running"]), int(found["num_requests_waiting"])


def ending(connection, response):
    """What the reader of a stream sees last: "[DONE]", an error's message, or "cut off"."""
    with closing(connection):
        try:
            *_, last, end = response.read().decode().split("\n\n")
        except (http.client.HTTPException, OSError, ValueError):
            return "cut off"
    assert end == "" and last.startswith("data: "), (last, end)
    last = last.removeprefix("data: ")
    return last if last == "[DONE]" else json.loads(last)["error"]["message"]


# --------------------------------------------------------------------------------------------------
# Faults. Each takes a number of ranks, makes it happen, and returns (what was seen, seconds).


def asked(server):
    """A stream and a whole answer in the middle of their work; the second as a function."""
    stream = server.open(COMPLETIONS, {**LONG, "stream": True})
    whole = server.send(COMPLETIONS, LONG)
    stream[1].read(300)

    def status():
        with closing(whole):
            try:
                return str(whole.getresponse().status)
            except (http.client.HTTPException, OSError):
                return "cut off"
    return stream, status


def loses(ranks, rank, number, *arguments):
    """A signal that a rank does not survive, or that stops it, under load."""
    with Server("--nproc", ranks, "--threshold", 16, *arguments).ready() as server:
        stream, whole = asked(server)
        began = time.monotonic()
        os.kill(server.ranks()[rank], number)
        seen = f"stream: {ending(*stream)}; whole: {whole()}"
        seconds = time.monotonic() - began
        code = server.wait(30)
        server.gone(5)
        return f"{seen}; exit code {code}", seconds


def idle(ranks, rank):
    """A rank killed when there is nothing to do."""
    with Server("--nproc", ranks, "--threshold", 16).ready() as server:
        began = time.monotonic()
        os.kill(server.ranks()[rank], signal.SIGKILL)
        code = server.wait(30)
        server.gone(5)
        return f"exit code {code}", time.monotonic() - began


def pauses(ranks):
    """A rank that is stopped for less than --step-timeout: slow, not stuck."""
    with Server("--nproc", ranks, "--threshold", 16, "--step-timeout", 10).ready() as server:
        whole = server.send(COMPLETIONS, {**LONG, "max_tokens": 100})
        wait_for(lambda: loads(server)[0], 10, "it runs")
        began = time.monotonic()
        os.kill(server.ranks()[-1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(server.ranks()[-1], signal.SIGCONT)
        with closing(whole):
            status = whole.getresponse().status
        seconds = time.monotonic() - began
        return f"whole: {status}; exit code {server.stop()}", seconds


def terminates(ranks, signals):
    """SIGTERM under load: what runs is finished, nothing else is taken. Twice: it ends at once."""
    with Server("--nproc", ranks, "--threshold", 16, "--grace", 25).ready() as server:
        tokens = 400 if signals == 1 else 3000
        streams = [server.open(COMPLETIONS, {**LONG, "max_tokens": tokens, "stream": True})
                   for _ in range(4)]
        began = time.monotonic()
        server.send_signal()
        refusal = wait_for(lambda: server.ask("/health")[0] == 503 and server.ask(
            COMPLETIONS, {"prompt": "a"})[0], 5, "it refuses")
        for _ in range(signals - 1):
            server.send_signal()
        ends = {ending(*stream) for stream in streams}
        seconds = time.monotonic() - began
        code = server.wait(30)
        server.gone(5)
        return f"new: {refusal}; streams: {', '.join(ends)}; exit code {code}", seconds


def queued(server):
    held = [server.open(COMPLETIONS, {**LONG, "stream": True}) for _ in range(2)]
    leaver = server.send(COMPLETIONS, LONG)
    wait_for(lambda: loads(server) == (2, 1), 10, "it waits")
    leaver.close()
    began = time.monotonic()
    wait_for(lambda: loads(server)[1] == 0, 10, "it is forgotten")
    seconds = time.monotonic() - began
    for connection, response in held:
        response.close()
        connection.close()
    return "nothing", seconds, 3


def prefilling(server):
    connection = server.send(COMPLETIONS, {**LONG, "prompt": [5] * 4000, "max_tokens": 50})
    wait_for(lambda: loads(server)[0] == 1, 10, "it runs")
    connection.close()
    return "nothing", None, 1


def decoding(server):
    connection, response = server.open(COMPLETIONS, {**LONG, "stream": True})
    response.read(500)
    response.close()
    connection.close()
    return "part of a stream", None, 1


def unread(server):
    server.send(COMPLETIONS, {**LONG, "stream": True}).close()
    return "nothing", None, 1


def half_closed(server):
    """A client that ends its side of the connection counts as gone: uvicorn closes the other."""
    connection = server.send(COMPLETIONS, LONG)
    wait_for(lambda: loads(server)[0] == 1, 10, "it runs")
    connection.sock.shutdown(socket.SHUT_WR)
    connection.sock.settimeout(10)
    seen = connection.sock.recv(1000)
    connection.close()
    return "connection closed" if seen == b"" else repr(seen), None, 1


def leaves(server, leave):
    """A client that leaves; the seconds until the engine has forgotten it, blocks and all."""
    ended = lambda: sum(value for name, value in metrics(server).items()
                        if name.startswith("request_success_total"))
    before = ended()
    seen, seconds, requests = leave(server)
    began = time.monotonic()
    wait_for(lambda: ended() == before + requests, 2, "the engine ends it")
    wait_for(lambda: loads(server) == (0, 0) and not metrics(server)["kv_cache_usage_perc"], 2,
             "the engine forgets it")
    return seen, time.monotonic() - began if seconds is None else seconds


SERVER_FAULTS = {
    "rank killed": lambda ranks: loses(ranks, -1, signal.SIGKILL),
    "rank 0 killed": lambda ranks: loses(ranks, 0, signal.SIGKILL),
    "rank killed, idle": lambda ranks: idle(ranks, -1),
    "rank stuck": lambda ranks: loses(ranks, -1, signal.SIGSTOP, "--step-timeout", 2),
    "rank 0 stuck": lambda ranks: loses(ranks, 0, signal.SIGSTOP, "--step-timeout", 2),
    "rank stopped for 2 s": pauses,
    "SIGTERM under load": lambda ranks: terminates(ranks, 1),
    "SIGTERM twice": lambda ranks: terminates(ranks, 2)}
CLIENT_FAULTS = {"leaves the queue": queued, "leaves in its prompt": prefilling,
                 "leaves its stream": decoding, "leaves unread": unread,
                 "half-closes": half_closed}


def faults(times, ranks):
    """The table: each fault so often, all outcomes with their numbers, and the time it took."""
    shared = lambda: {*os.listdir("/dev/shm")}
    print(f"{'fault':28} {'times':>5} {'seconds, median':>16} {'most':>6}  what was seen")

    def row(name, found, before):
        seconds = [one for _, one in found]
        seen = collections.Counter(text for text, _ in found)
        print(f"{name:28} {len(found):5} {statistics.median(seconds):16.2f} {max(seconds):6.2f}  "
              + " | ".join(f"{count} x {text}" for text, count in seen.items()), flush=True)
        assert shared() == before, f"left in /dev/shm: {shared() - before}"
    before = shared()
    for name, fault in SERVER_FAULTS.items():          # Server fails if a process is left
        row(name, [fault(ranks) for _ in range(times)], before)
    with Server("--nproc", ranks, *NARROW).ready() as server:
        for name, fault in CLIENT_FAULTS.items():
            row(f"client {name}", [leaves(server, fault) for _ in range(times)], before)
        port = int(server.url.rsplit(":", 1)[1])
        assert server.stop() == 0
    socket.create_server(("127.0.0.1", port)).close()
    print("leftovers: no process, nothing in /dev/shm, the port is free")


# --------------------------------------------------------------------------------------------------
# Hostile input


def rss(server):
    """Megabytes of all ranks, each one's own."""
    total = 0
    for pid in server.ranks():
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        total += sum(int(n) for n in re.findall(r"^Private_\w+:\s+(\d+)", text, re.M))
    return total / 1024


def greedy(server):
    return server.complete(PROMPT, max_tokens=24)["choices"][0]["text"]


def schemathesis(examples):
    """So many cases for each of the operations; no 5xx, and the same greedy answer afterwards."""
    import schemathesis as made
    from hypothesis import HealthCheck, Phase, given, settings
    with Server("--nproc", 2, "--threshold", 16, "--max-model-len", 64,
                "--quiet").ready() as server:
        answer, statuses = greedy(server), collections.Counter()
        document = made.openapi.from_url(f"{server.url}/openapi.json")
        for operation in (found.ok() for found in document.get_all_operations()):
            @given(case=operation.as_strategy())
            @settings(max_examples=examples, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck), phases=[Phase.generate])
            def check(case):
                response = case.call(timeout=60)
                statuses[case.operation.label, response.status_code] += 1
                assert response.status_code < 500, (response.status_code, case.as_curl_command())
            check()
        for (label, status), count in sorted(statuses.items()):
            print(f"{label:32} {status} {count:6}")
        same = greedy(server) == answer
        print(f"{sum(statuses.values())} requests, no 5xx; the same greedy answer after: {same}")
        assert same and server.stop() == 0


def nested(random, depth):
    if depth == 0 or random.random() < 0.3:
        return random.choice([None, True, 0, -1, 1e308, 10 ** 30, "", "a", "\ud800", "a" * 1000, [],
                              {}, float("nan"), float("inf")])
    if random.random() < 0.5:
        return [nested(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(["a", "prompt", "role", ""]): nested(random, depth - 1)
            for _ in range(random.randrange(4))}


FIELDS = ("prompt messages max_tokens min_tokens temperature top_p top_k min_p seed n stop stream "
          "stop_token_ids stream_options logprobs top_logprobs model ignore_eos echo best_of tools "
          "logit_bias response_format max_completion_tokens user max_token").split()


def hostile_body(random):
    kind = random.random()
    if kind < 0.7:                      # a request with some of its values replaced
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        body.pop(random.choice(["prompt", "messages"]))
        for field in random.sample(FIELDS, random.randrange(1, 4)):
            body[field] = nested(random, 3)
        return json.dumps(body).encode()
    if kind < 0.8:
        return random.randbytes(random.randrange(200))
    if kind < 0.9:                      # a request with some bytes changed
        text = bytearray(b'{"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0.5}')
        for _ in range(random.randrange(1, 5)):
            text[random.randrange(len(text))] = random.randrange(256)
        return bytes(text)
    if kind < 0.999:
        depth = random.choice([10, 1000, 100_000])
        return random.choice([
            b'{"prompt": ' + b"[" * depth, b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
            b'{"a": ' * depth, b'{"prompt": "a", "seed": ' + b"9" * depth + b"}",
            b'{"prompt": "a", "n": 1e' + b"9" * depth + b"}",
            b'{"prompt": [' + b"1," * depth + b"1]}", b'{"prompt": [' + b'"a",' * depth + b'1]}',
            b'{"prompt": "' + b"a" * depth + b'"}', b'{"prompt": "\xff' + b"\xfe" * depth + b'"}'])
    return b'{"prompt": "' + b"a" * 50_000_000 + b'"}'


def hostile(count):
    """So many bodies; no 5xx, the memory before and after, and the same greedy answer."""
    with Server("--nproc", 2, "--threshold", 16, "--max-model-len", 256,
                "--quiet").ready() as server:
        answer, before = greedy(server), rss(server)
        dice, statuses = random.Random(0), collections.Counter()
        for _ in range(count):
            path, body = dice.choice([COMPLETIONS, CHAT]), hostile_body(dice)
            connection, response = server.open(path, body, JSON)
            with closing(connection):
                raw = response.read()
            statuses[response.status] += 1
            assert response.status < 500, (response.status, raw, body[:300])
        print(f"{count} bodies, by status: {dict(sorted(statuses.items()))}")
        print(f"private memory of the ranks: {before:.0f} MB before, {rss(server):.0f} MB after")
        same = greedy(server) == answer
        print(f"the same greedy answer as before: {same}")
        assert same and server.stop() == 0


# --------------------------------------------------------------------------------------------------
# Load


def handles(server):
    """(threads, file descriptors) of all ranks."""
    each = [(len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")))
            for pid in server.ranks()]
    return tuple(map(sum, zip(*each)))


def visit(server, dice):
    """One client: streams or not, leaves early now and then. Returns "done", "left", or why not."""
    chat, stream, leave = dice.random() < 0.3, dice.random() < 0.7, dice.random() < 0.2
    body = {"max_tokens": dice.choice([4, 16, 64, 200]), "temperature": dice.choice([0, 1]),
            "stream": stream, "n": dice.choice([1, 1, 1, 3])}
    words = " ".join(dice.choices("the cat fox a old river sang to moon".split(),
                                  k=dice.choice([3, 30, 300])))
    body |= {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
    connection = server.send(CHAT if chat else COMPLETIONS, body)
    with closing(connection):
        if leave:
            time.sleep(dice.random() * 0.3)
            return "left"
        response = connection.getresponse()
        raw = response.read()
    if response.status != 200:
        return f"{response.status}"
    return "done" if not stream or raw.endswith(b"data: [DONE]\n\n") else "cut off"


def soak(minutes, ranks, clients=16):
    """Clients of many kinds for so long: outcomes, memory, blocks, threads and descriptors."""
    with Server("--nproc", ranks, "--threshold", 256, "--kv-blocks", 2000,
                "--quiet").ready() as server:
        done, stop, samples = collections.Counter(), time.monotonic() + minutes * 60, []

        def client(seed):
            dice = random.Random(seed)
            while time.monotonic() < stop:
                try:
                    outcome = visit(server, dice)
                except (http.client.HTTPException, OSError) as e:
                    outcome = repr(e)
                done[outcome] += 1
        with ThreadPoolExecutor(clients) as pool:
            running = [pool.submit(client, seed) for seed in range(clients)]
            began = time.monotonic()
            while time.monotonic() < stop:
                time.sleep(min(10, minutes * 6))
                samples.append(((time.monotonic() - began) / 60, rss(server), *handles(server)))
                print("minute {:.1f}: {:.0f} MB, {} threads, {} descriptors".format(*samples[-1]),
                      dict(done), flush=True)
            for one in running:
                one.result()
        wait_for(lambda: loads(server) == (0, 0), 10, "all have ended")
        half = samples[len(samples) // 2:]               # the first half fills caches
        slope = statistics.linear_regression(*zip(*[one[:2] for one in half])).slope if len(
            half) > 1 else float("nan")
        used = metrics(server)["kv_cache_usage_perc"]
        print(f"{dict(done)}; RSS slope of the second half {slope:.2f} MB a minute; KV blocks in "
              f"use at the end: {used:.0%}; threads and descriptors at the end: {handles(server)}")
        assert used == 0 and server.stop() == 0


async def one_stream(address, number, tokens):
    """The times and texts of a stream's chunks, read by hand from a socket."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({**LONG, "prompt": f"{PROMPT}, number {number},", "max_tokens": tokens,
                       "stream": True})
    writer.write(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n"
                 f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                 f"{body}".encode())
    times, texts, last = [], [], None
    while line := await reader.readline():
        if line.startswith(b"data: "):
            last = line[6:].strip()
            if last != b"[DONE]":
                times.append(time.monotonic())
                texts.append(json.loads(last)["choices"][0]["text"])
    writer.close()
    return times, "".join(texts), last


def streams(count, ranks, tokens=64):
    """So many at once: none lost, the text of each that of the same request alone, and the gaps."""
    with Server("--nproc", ranks, "--threshold", "auto", "--quiet").ready() as server:
        async def together():
            return await asyncio.gather(*(one_stream(server.address, number, tokens)
                                          for number in range(count)))
        began = time.monotonic()
        found = asyncio.run(together())
        seconds = time.monotonic() - began
        lost = sum(last != b"[DONE]" for _, _, last in found)
        checked = random.Random(0).sample(range(count), min(16, count))
        wrong = [i for i in checked if found[i][1] != server.complete(
            f"{PROMPT}, number {i},", max_tokens=tokens)["choices"][0]["text"]]
        gaps = sorted(b - a for times, _, _ in found for a, b in zip(times, times[1:]))
        p50, p99 = gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]
        print(f"{count} streams of {tokens} tokens in {seconds:.1f} s: {lost} lost; {len(wrong)} "
              f"of {len(checked)} differ from the same request alone; inter-token p50 "
              f"{p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, p99/p50 {p99 / p50:.2f}")
        assert lost == 0 and server.stop() == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for function, options in ((faults, dict(times=20, ranks=2)), (hostile, dict(count=10000)),
                              (schemathesis, dict(examples=2000)),
                              (soak, dict(minutes=20.0, ranks=8)),
                              (streams, dict(count=256, ranks=8))):
        command = commands.add_parser(function.__name__)
        command.set_defaults(function=function)
        for name, value in options.items():
            command.add_argument(f"--{name}", type=type(value), default=value)
    options = vars(parser.parse_args())
    del options["command"]
    options.pop("function")(**options)


if __name__ == "__main__":
    sys.exit(main())
