"""The HTTP API as clients meet it: OpenAI's own client, bytes on a socket, what must be refused.

    pytest tests/test_http.py

Two servers live through this file: `server`, two ranks with every invariant checked in each step
and with drafts (suffix decoding), which nobody must notice, and `small`, one rank with a small pool
and one request at a time. The words of the model are never known here: what a stream or a batch
says is held to what the same server says to the same request alone, and after everything that is
refused the server must still give the same greedy answer.
"""
import asyncio
import http.client
import json
import signal
import threading
import time
import unicodedata
from contextlib import closing
from types import SimpleNamespace

import openai
import pytest

from assets.protocol import EmbeddingBody
from assets.tokenizer import RawTokens, Tokenizer
from model import Config, Sample, SamplingParams
from serve import Api, ChatBody, CompletionBody, Failure, Output, UserError
from server import JSON, ROOT, Server, events, needs_proc, wait_for
from stress import metrics

pytestmark = needs_proc

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "assets/tiny"
TINY = ROOT / "assets" / "tiny"
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
LENGTH = 16                             # tokens of most answers
POOL, PAGE = 4, 16                      # of the small server: 4 blocks of 16 tokens


@pytest.fixture(scope="module")
def server():
    with Server("--nproc", 2, "--threshold", 16, "--kv-blocks", 600,  # few: quick checks
                "--explain", "--speculate", "suffix", checked=True).ready() as server:
        yield server
        assert server.stop() == 0
        assert server.err == [], "a server that refused bad requests has nothing to complain of"


@pytest.fixture(scope="module")
def small_servers():
    """Holds the living small server, if there is one."""
    servers = []
    yield servers
    for server in servers:
        with server:
            assert server.stop(signal.SIGINT) == 0


@pytest.fixture
def small(small_servers):
    """The small server; a new one if a test has brought the last one down."""
    if small_servers and small_servers[-1].process.poll() is not None:
        small_servers.pop().kill()
    if not small_servers:
        small_servers.append(Server("--kv-blocks", POOL, "--block-size", PAGE, "--max-seqs", 1,
                                    "--threshold", 16, "--explain", checked=True).ready())
    return small_servers[-1]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300,
                       http_client=openai.DefaultHttpxClient(trust_env=False)) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(TINY, Config.read(TINY))


@pytest.fixture(scope="module")
def answer(server):
    """What the server says to PROMPT, greedily, before anything has been asked of it."""
    return text_of(server.complete(PROMPT))


def text_of(answer, index=0):
    choice = answer["choices"][index]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def refused(server, answer, path, body, status=400, headers=None):
    """Ask, expect this status in OpenAI's error format and a healthy server; returns the error."""
    options = {} if headers is None else {"headers": headers}
    found, reply = server.ask(path, body, **options)
    assert found == status, reply
    assert reply.keys() == {"error"}, reply
    error = reply["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert error["type"] == "invalid_request_error" and error["message"], error
    assert "\n" not in error["message"], error
    assert text_of(server.complete(PROMPT)) == answer
    return error


# --------------------------------------------------------------------------------------------------
# OpenAI's client. `create(client, chat, ...)` asks either endpoint for the same things.


def create(client, chat, **fields):
    """A completion or chat of exactly max_tokens, unless stopped; greedy unless told otherwise."""
    fields = {"model": MODEL, "max_tokens": LENGTH, "temperature": 0, **fields}
    fields["extra_body"] = {"ignore_eos": True, **fields.get("extra_body", {})}
    if chat:
        return client.chat.completions.create(messages=MESSAGES, **fields)
    return client.completions.create(**{"prompt": PROMPT, **fields})


def texts(reply, chat):
    return [choice.message.content if chat else choice.text for choice in reply.choices]


def pieces(chunks, chat, index=0):
    """The texts that a stream brought for one of its choices, empty ones left out."""
    found = [choice.delta.content if chat else choice.text for chunk in chunks
             for choice in chunk.choices if choice.index == index]
    return [piece for piece in found if piece]


ENDPOINTS = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
DRAWS = pytest.mark.parametrize("draw", [{}, {"temperature": 1.0, "seed": 5},
                                         {"temperature": 4.0, "seed": 6, "top_p": 0.99}],
                                ids=["greedy", "seeded", "wild"])


@ENDPOINTS
def test_answer_has_the_clients_fields(client, chat):
    """Holds a plain answer to the fields that OpenAI's client reads, and usage to its own sum."""
    before = int(time.time())
    reply = create(client, chat, max_tokens=5)
    assert reply.object == ("chat.completion" if chat else "text_completion")
    assert reply.id.startswith("chatcmpl-" if chat else "cmpl-")
    assert reply.model == MODEL and before <= reply.created <= time.time()
    [choice] = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert not chat or choice.message.role == "assistant"
    assert texts(reply, chat)[0]
    assert reply.usage.completion_tokens == 5 and reply.usage.prompt_tokens > 0
    assert reply.usage.total_tokens == 5 + reply.usage.prompt_tokens


@ENDPOINTS
@DRAWS
def test_stream_says_what_the_answer_says(client, chat, draw):
    """Holds the pieces of a stream, joined, to the text of the same request not streamed, and the
    last of them to the only finish reason; usage comes after it."""
    whole = create(client, chat, **draw)
    chunks = list(create(client, chat, stream=True, stream_options={"include_usage": True}, **draw))
    assert "".join(pieces(chunks, chat)) == texts(whole, chat)[0]
    assert len(pieces(chunks, chat)) > 1, "a stream in one piece is none"
    *parts, last = chunks
    assert last.choices == [] and last.usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in parts)
    finishes = [chunk.choices[0].finish_reason for chunk in parts]
    assert finishes == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert {chunk.id for chunk in chunks} == {last.id} and last.model == MODEL


def test_drafts_show_in_the_counters_only(server):
    """Holds usage, /metrics and --explain to the drafts of an answer that was given before, and the
    answer and its log-probabilities to those of the first time."""
    fields = dict(prompt="The drafted fox", max_tokens=40, logprobs=1)
    first, before = server.complete(**fields), metrics(server)
    again, after = server.complete(**fields), metrics(server)
    probabilities, wanted = (answer["choices"][0].pop("logprobs") for answer in (again, first))
    assert again["choices"] == first["choices"] and probabilities["tokens"] == wanted["tokens"]
    assert probabilities["token_logprobs"] == pytest.approx(wanted["token_logprobs"], abs=1e-4)
    details = again["usage"]["completion_tokens_details"]
    accepted, rejected = (details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
    added = [after[name] - before[name] for name in (
        "spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")]
    assert added == [accepted, accepted + rejected] and accepted > 20
    wait_for(lambda: "drafts accepted so far" in server.steps()[-1].text, 5, "the last step's line")


def test_a_stream_says_once_who_speaks(client):
    """Holds a chat's stream to name the role in its first chunk only. (It was in every one, and
    clients that add the pieces up, OpenAI's own too, made "assistantassistant" of them.)"""
    roles = [chunk.choices[0].delta.role for chunk in create(client, True, stream=True)]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)


def test_choices_of_the_last_seeds(server, answer):
    """Holds n choices of which only the first can have its seed to a refusal of all of them. (The
    first of them once ran on for a client that had been told off.)"""
    begun = len(server.steps())
    error = refused(server, answer, COMPLETIONS, {"prompt": [5] * 30, "seed": 2 ** 64 - 1, "n": 2})
    assert "seed" in error["message"]
    assert not any(" 30 prefill" in line.text for line in server.steps()[begun:])


@ENDPOINTS
def test_stream_without_usage(client, chat):
    """Holds a stream that was not asked for usage to none of it: every chunk has a choice."""
    chunks = list(create(client, chat, stream=True, max_tokens=4))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


@ENDPOINTS
def test_bytes_of_a_stream(server, chat):
    """Holds the bytes of a stream to the format of server-sent events, [DONE] the last of them."""
    body = {"prompt": PROMPT, "messages": MESSAGES, "max_tokens": 6, "stream": True,
            "ignore_eos": True}
    body.pop("prompt" if chat else "messages")
    connection, response = server.open(CHAT if chat else COMPLETIONS, body)
    try:
        assert response.status == 200
        assert response.getheader("content-type").split(";")[0] == "text/event-stream"
        *chunks, last = events(response.read())
    finally:
        connection.close()
    assert last == "[DONE]"
    chunks = [json.loads(chunk) for chunk in chunks]
    assert {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk" if chat else "text_completion"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    if chat:
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


@ENDPOINTS
def test_two_choices(client, chat):
    """Holds n = 2 to two different choices, the same again for the same seed, streamed or not."""
    fields = {"n": 2, "seed": 3, "temperature": 1.0}
    first, second = create(client, chat, **fields), create(client, chat, **fields)
    chunks = list(create(client, chat, stream=True, **fields))
    assert [choice.index for choice in first.choices] == [0, 1]
    assert len(set(texts(first, chat))) == 2
    assert texts(first, chat) == texts(second, chat)
    assert ["".join(pieces(chunks, chat, i)) for i in range(2)] == texts(first, chat)
    assert first.usage.completion_tokens == 2 * LENGTH
    for index in range(2):
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices
                if choice.index == index]
        assert ends == [None] * (len(ends) - 1) + ["length"]


def test_most_choices(server):
    """Holds n to its limit: 128 choices, the same when greedy, and counted one by one."""
    reply = server.complete(PROMPT, n=128, max_tokens=1)
    assert [choice["index"] for choice in reply["choices"]] == list(range(128))
    assert len({choice["text"] for choice in reply["choices"]}) == 1
    assert reply["usage"]["completion_tokens"] == 128


def test_batch_of_prompts(client, server, answer):
    """Holds each prompt of a batch, texts or ids, to its answer alone, in order, n for each."""
    prompts = [PROMPT, "The cat", PROMPT]
    reply = client.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=4, temperature=0,
                                      extra_body={"ignore_eos": True})
    alone = [text_of(server.complete(prompt)) for prompt in prompts]
    assert alone[0] == answer
    assert [choice.index for choice in reply.choices] == list(range(6))
    assert texts(reply, False) == [text for text in alone for _ in range(2)]
    ids = [[5, 6, 7], [8, 9]]
    both = server.complete(ids)
    assert [text_of(both, i) for i in range(2)] == [text_of(server.complete(one)) for one in ids]
    assert both["usage"]["prompt_tokens"] == 5


def test_completion_logprobs(client):
    """Holds tokens, logprobs and offsets to the text, and a stream of them to the whole."""
    reply = create(client, False, logprobs=3)
    text, found = reply.choices[0].text, reply.choices[0].logprobs
    assert "".join(found.tokens) == text and len(found.tokens) == LENGTH
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs):
        assert len(top) == 3 and max(top.values()) <= 0
        assert top[token] == logprob == max(top.values()), "greedy takes the likeliest"
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(LENGTH)]
    chunks = list(create(client, False, logprobs=3, stream=True))
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [t for one in streamed for t in one.tokens] == found.tokens
    assert [p for one in streamed for p in one.token_logprobs] == pytest.approx(
        found.token_logprobs)
    assert [top.keys() for one in streamed for top in one.top_logprobs] == [
        top.keys() for top in found.top_logprobs]
    assert [offset for one in streamed for offset in one.text_offset] == found.text_offset
    none = create(client, False, logprobs=0).choices[0].logprobs
    assert none.token_logprobs == pytest.approx(found.token_logprobs)
    assert all(top == {} for top in none.top_logprobs)


def test_chat_logprobs(client):
    """Holds the entries of a chat's logprobs to its text, and streamed ones to the whole."""
    reply = create(client, True, logprobs=True, top_logprobs=2)
    found = reply.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in found).decode() == texts(reply, True)[0]
    assert len(found) == LENGTH
    for one in found:
        assert bytes(one.bytes).decode(errors="replace") == one.token
        assert one.logprob == one.top_logprobs[0].logprob >= one.top_logprobs[1].logprob
        assert one.token == one.top_logprobs[0].token and one.logprob <= 0
    chunks = create(client, True, logprobs=True, top_logprobs=2, stream=True)
    streamed = [one for chunk in chunks for one in (chunk.choices[0].logprobs or
                                                    SimpleNamespace(content=[])).content]
    assert [one.token for one in streamed] == [one.token for one in found]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in found])
    plain = create(client, True, logprobs=True).choices[0].logprobs.content
    assert all(one.top_logprobs == [] for one in plain)
    assert create(client, True).choices[0].logprobs is None


@ENDPOINTS
def test_seed(client, chat):
    """Holds a seed to one text whenever it is used, and different seeds to different texts."""
    def draw(seed):
        return texts(create(client, chat, temperature=1.5, max_tokens=8, seed=seed), chat)[0]
    first = [draw(seed) for seed in (0, -7, 2 ** 63 - 1)]
    assert [draw(seed) for seed in (0, -7, 2 ** 63 - 1)] == first
    assert len(set(first)) > 1
    assert len({draw(None) for _ in range(3)}) > 1, "without a seed each draw is a new one"


@ENDPOINTS
def test_stop(client, chat):
    """Holds stop strings to cutting the text before the first of them, whichever it is."""
    text = texts(create(client, chat), chat)[0]
    middle, late = text[len(text) // 2:][:3], text[-3:]
    for stop in (middle, [late, middle], [middle + "\0"], [late + "\0", middle], ["\0", late]):
        places = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop)]
        found = [place for place in places if place >= 0]
        reply = create(client, chat, stop=stop)
        assert texts(reply, chat)[0] == (text[:min(found)] if found else text)
        assert reply.choices[0].finish_reason == ("stop" if found else "length")


@ENDPOINTS
def test_stop_across_chunks_never_shows(client, chat):
    """Holds a stream to hiding a stop string that two of its chunks share, to its first letter, and
    to giving back what only began like one."""
    plain = pieces(create(client, chat, stream=True), chat)
    text, tried = "".join(plain), 0
    for i in range(1, len(plain)):
        start = len("".join(plain[:i]))
        stop = plain[i - 1][-1] + plain[i]
        if text.find(stop) == start - 1:
            chunks = list(create(client, chat, stop=stop, stream=True))
            assert "".join(pieces(chunks, chat)) == text[:start - 1]
            assert chunks[-1].choices[0].finish_reason == "stop"
            never = list(create(client, chat, stop=stop + "\0", stream=True))
            assert "".join(pieces(never, chat)) == text
            assert never[-1].choices[0].finish_reason == "length"
            tried += 1
        if tried == 2:
            return
    assert tried, f"no two chunks to share a stop string in {plain}"


def test_eight_streams_at_once(server):
    """Holds eight streams side by side to what each of their prompts gets alone."""
    prompts = [f"{word} the" for word in "In On By At So To If But".split()]

    async def one(client, prompt):
        stream = await client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=LENGTH, temperature=0, stream=True,
            extra_body={"ignore_eos": True})
        return [chunk.choices[0].text async for chunk in stream]

    async def all_of_them():
        async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False)) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    begun = len(server.steps())
    together = asyncio.run(all_of_them())
    steps = len(server.steps()) - begun
    assert steps < 8 * LENGTH / 2, f"{steps} steps: they did not share any"
    alone = [text_of(server.complete(prompt, max_tokens=LENGTH)) for prompt in prompts]
    assert ["".join(found) for found in together] == alone


@ENDPOINTS
def test_raw_response_and_async_client(client, server, chat):
    """Holds with_raw_response to the same answer behind its headers, and the asynchronous client
    to the text of the synchronous one, whole and streamed."""
    plain = texts(create(client, chat), chat)
    raw = (client.chat.completions if chat else client.completions).with_raw_response.create(
        model=MODEL, max_tokens=LENGTH, temperature=0, extra_body={"ignore_eos": True},
        **({"messages": MESSAGES} if chat else {"prompt": PROMPT}))
    assert raw.headers["content-type"] == "application/json" and texts(raw.parse(), chat) == plain

    async def both():
        async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300,
                http_client=openai.DefaultAsyncHttpxClient(trust_env=False)) as client:
            whole = await create(client, chat)
            stream = await create(client, chat, stream=True)
            return texts(whole, chat), "".join(pieces([chunk async for chunk in stream], chat))
    assert asyncio.run(both()) == (plain, plain[0])


def test_client_sees_its_own_errors(client):
    """Holds the statuses to the exceptions that OpenAI's client makes of them."""
    with pytest.raises(openai.BadRequestError, match="max_tokens = 0") as bad:
        create(client, False, max_tokens=0)
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        create(client, True, max_tokens=10 ** 6)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="gpt-nothing") as unknown:
        create(client, True, model="gpt-nothing")
    assert unknown.value.code == "model_not_found"


def test_models_and_health(client, server):
    """Holds the list of models to the one that is served, with the name that requests may use."""
    [model] = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 4096)
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="gpt-nothing"):
        client.models.retrieve("gpt-nothing")
    assert server.ask("/health") == (200, {"status": "ok"})
    status, reply = server.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 1})
    assert status == 200 and reply["model"] == MODEL, "no model named is this one"


# --------------------------------------------------------------------------------------------------
# What is refused. Each entry: the fields, and what the message must name.

CASES = {
    "no prompt": ({"prompt": None}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "empty ids": ({"prompt": [[]]}, "prompt"),
    "an empty one in a batch": ({"prompt": ["a", ""]}, "prompt"),
    "empty ids in a batch": ({"prompt": [[5], []]}, "prompt"),
    "number for prompt": ({"prompt": 5}, "prompt must be a text, a list of texts, a list of"),
    "object for prompt": ({"prompt": {"text": "a"}}, "prompt"),
    "mixed batch": ({"prompt": [5, "a"]}, "prompt"),
    "half an id": ({"prompt": [1.5]}, "prompt"),
    "true for an id": ({"prompt": [True]}, "prompt"),
    "id out of range": ({"prompt": [5, 4096]}, "4096"),
    "id out of range in a batch": ({"prompt": [[5], [6, 99999]]}, "99999"),
    "negative id": ({"prompt": [-1]}, "-1"),
    "id beyond 64 bits": ({"prompt": [10 ** 30]}, str(10 ** 30)),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens = 0"),
    "max_tokens negative": ({"max_tokens": -5}, "max_tokens = -5"),
    "max_tokens huge": ({"max_tokens": 10 ** 9}, str(10 ** 9)),
    "max_tokens beyond 64 bits": ({"max_tokens": 10 ** 30}, str(10 ** 30)),
    "text for max_tokens": ({"max_tokens": "5"}, "max_tokens"),
    "fraction for max_tokens": ({"max_tokens": 2.5}, "max_tokens"),
    "temperature NaN": ({"temperature": float("nan")}, "temperature = nan"),
    "temperature infinite": ({"temperature": float("inf")}, "temperature = inf"),
    "temperature negative": ({"temperature": -1}, "temperature = -1"),
    "text for temperature": ({"temperature": "hot"}, "temperature"),
    "top_p 2": ({"top_p": 2}, "top_p = 2"),
    "top_p NaN": ({"top_p": float("nan")}, "top_p = nan"),
    "top_k -2": ({"top_k": -2}, "top_k = -2"),
    "min_p 2": ({"min_p": 2}, "min_p = 2"),
    "n 0": ({"n": 0}, "n = 0"),
    "n 1000": ({"n": 1000}, "n = 1000"),
    "fraction for n": ({"n": 1.5}, "n"),
    "logprobs 21": ({"logprobs": 21}, "logprobs = 21"),
    "logprobs negative": ({"logprobs": -1}, "logprobs = -1"),
    "empty stop": ({"stop": ""}, "stop must be a text or a list"),
    "empty stop of several": ({"stop": ["a", ""]}, "stop"),
    "number for stop": ({"stop": 5}, "stop"),
    "too many stops": ({"stop": ["a"] * 33}, "stop"),
    "min_tokens above max_tokens": ({"min_tokens": 4}, "min_tokens = 4"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens = -1"),
    "stop_token_ids out of range": ({"stop_token_ids": [4096]}, "4096"),
    "number for stop_token_ids": ({"stop_token_ids": 5}, "stop_token_ids"),
    "misspelt": ({"max_token": 4}, "max_token"),
    "more than fits": ({"prompt": ["a"] * 1281}, "1281"),
    "text for seed": ({"seed": "a"}, "seed"),
    "text for stream": ({"stream": "yes"}, "stream"),
    "number for stream_options": ({"stream_options": 5}, "stream_options"),
    "number for model": ({"model": 5}, "model"),
}
UNSUPPORTED = {"echo": True, "best_of": 2, "suffix": "end", "frequency_penalty": 0.5,
               "presence_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
               "tools": [{"type": "function"}], "response_format": {"type": "json_object"},
               "skip_special_tokens": False}
DEFAULTS = {"echo": False, "best_of": 1, "suffix": None, "frequency_penalty": 0.0,
            "presence_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "tools": [],
            "response_format": {"type": "text"}, "n": None, "stop": None, "seed": None,
            "temperature": 0, "top_p": 1, "top_k": -1, "min_p": None, "stream": None,
            "stream_options": None, "logprobs": None, "ignore_eos": True, "user": "somebody",
            "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "min_tokens": 0,
            "stop_token_ids": [], "nothing_known": None}
CHAT_CASES = {
    "no messages": ({"messages": []}, "messages"),
    "null for messages": ({"messages": None}, "messages"),
    "text for messages": ({"messages": "hello"}, "messages"),
    "no content": ({"messages": [{"role": "user"}]}, "content"),
    "no role": ({"messages": [{"content": "hello"}]}, "role"),
    "number for content": ({"messages": [{"role": "user", "content": 5}]}, "content"),
    "list for content": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                         "content"),
    "number for a message": ({"messages": [5]}, "messages"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens = 0"),
    "number for logprobs": ({"logprobs": 3}, "logprobs"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs = 21"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
}


@pytest.mark.parametrize("fields, named", CASES.values(), ids=CASES)
def test_refused(server, answer, fields, named):
    """Holds a bad value to a 400 that names it, and to no effect on what comes after."""
    body = {"prompt": PROMPT, "max_tokens": 3, **fields}
    assert named in refused(server, answer, COMPLETIONS, body)["message"]


@pytest.mark.parametrize("fields, named", CHAT_CASES.values(), ids=CHAT_CASES)
def test_refused_chat(server, answer, fields, named):
    """Holds a bad value in a chat to a 400 that names it, and to no effect on what comes after."""
    assert named in refused(server, answer, CHAT, {"messages": MESSAGES, **fields})["message"]


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_unsupported_is_refused_not_ignored(server, answer, field):
    """Holds a field that this server cannot honour to a 400 that names it, on both endpoints."""
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        error = refused(server, answer, path, {**body, field: UNSUPPORTED[field]})
        assert field in error["message"]
    if not isinstance(UNSUPPORTED[field], list):
        error = refused(server, answer, COMPLETIONS, {"prompt": PROMPT, field: [0]})
        assert field in error["message"]


@pytest.mark.parametrize("field", ["best_of", "repetition_penalty"])
def test_unsupported_zero_is_not_the_default(server, answer, field):
    """Holds 0 to a refusal where the default is 1. (What is false was once taken for it.)"""
    assert field in refused(server, answer, COMPLETIONS, {"prompt": PROMPT, field: 0})["message"]


def test_huge_values_are_not_said_back(server, answer):
    """Holds the message about a huge value to a length that a person reads."""
    huge = "x" * 100_000
    for path, body, status in (
            (COMPLETIONS, {"prompt": [5, huge]}, 400), (COMPLETIONS, {"prompt": {huge: 1}}, 400),
            (COMPLETIONS, {"prompt": "a", "stop": [huge]}, 400),
            (COMPLETIONS, {"prompt": "a", huge: 1}, 400),
            (COMPLETIONS, {"prompt": "a", "model": huge}, 404),
            (COMPLETIONS, {"prompt": "a", "max_tokens": 10 ** 4000}, 400),
            (COMPLETIONS, {"prompt": [10 ** 4000]}, 400),
            (CHAT, {"messages": [{"role": "user", "content": [huge]}]}, 400),
            (f"/v1/{huge[:5000]}", {}, 404)):
        error = refused(server, answer, path, body, status)
        assert len(error["message"]) < 300, error["message"][:400]


def test_body_beyond_the_limit(server, answer):
    """Holds a body of more than 4 MiB to a 413, whether its length is said or not."""
    large = b'{"prompt": "' + b"a" * (5 << 20) + b'"}'
    assert "4194304" in refused(server, answer, COMPLETIONS, large, 413)["message"]
    connection = http.client.HTTPConnection(server.address, timeout=60)
    with closing(connection):
        connection.request("POST", COMPLETIONS, iter([large]), JSON)         # in chunks
        response = connection.getresponse()
        assert response.status == 413
        assert json.loads(response.read())["error"]["type"] == "invalid_request_error"
    assert text_of(server.complete(PROMPT)) == answer

@pytest.mark.parametrize("field, value, plain", [
    ("tool_choice", "required", "none"), ("functions", [{"name": "f"}], []),
    ("function_call", {"name": "f"}, "none"), ("modalities", ["audio"], ["text"])])
def test_what_would_change_a_chat_is_not_ignored(server, answer, field, value, plain):
    """Holds a field that asks for another kind of answer to a 400 that names it, and its default to
    no effect."""
    body = {"messages": MESSAGES, "max_tokens": 2}
    assert server.ask(CHAT, {**body, field: plain})[0] == 200
    assert field in refused(server, answer, CHAT, {**body, field: value})["message"]


def test_defaults_are_accepted(server, answer):
    """Holds every field at its default, null included, to the answer that leaving it out gives."""
    for field, value in DEFAULTS.items():
        assert text_of(server.complete(PROMPT, **{field: value})) == answer, field
    assert text_of(server.complete(PROMPT, **DEFAULTS)) == answer


def test_chat_length(server):
    """Holds max_completion_tokens to its word, before the older max_tokens."""
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3},
                   {"max_completion_tokens": 3, "max_tokens": 9}):
        status, reply = server.ask(CHAT, {"messages": MESSAGES, "ignore_eos": True, **fields})
        assert (status, reply["usage"]["completion_tokens"]) == (200, 3), (fields, reply)


def test_stop_token_ids(server):
    """Holds a token id that ends an answer to being no part of it, and min_tokens to its word: no
    stop of any kind before it."""
    status, reply = server.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": LENGTH, "logprobs": 0,
                                             "temperature": 0, "ignore_eos": True})
    words, text = reply["choices"][0]["logprobs"]["tokens"], text_of(reply)
    ids = Tokenizer(TINY, Config.read(TINY)).encode(text, bos=False)
    assert len(ids) == len(words) == LENGTH, "the text is cut into the tokens that it was made of"
    stop = ids[4]
    first = ids.index(stop)
    ended = server.complete(PROMPT, max_tokens=LENGTH, stop_token_ids=[stop])
    assert text_of(ended) == "".join(words[:first])
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["usage"]["completion_tokens"] == first + 1
    longer = server.complete(PROMPT, max_tokens=LENGTH, stop_token_ids=[stop], logprobs=0,
                             min_tokens=first + 3)
    assert longer["choices"][0]["logprobs"]["tokens"][first] != words[first], "it was drawn"
    assert longer["usage"]["completion_tokens"] >= first + 3
    assert text_of(longer).startswith("".join(words[:first]))
    late = server.complete(PROMPT, max_tokens=LENGTH, stop=[words[0]], min_tokens=LENGTH)
    assert (text_of(late), late["choices"][0]["finish_reason"]) == (text, "length")
    eos = server.complete(PROMPT, max_tokens=400, min_tokens=400, ignore_eos=False)
    assert eos["usage"]["completion_tokens"] == 400, "an end-of-text token came too early"
    assert server.complete(PROMPT, max_tokens=400, ignore_eos=False)["usage"][
        "completion_tokens"] < 400, "this text never ends, and shows nothing"


def test_unknown_model(server, answer):
    """Holds another model's name to a 404 that names it and the one that is here."""
    for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})):
        error = refused(server, answer, path, {**body, "model": "gpt-nothing"}, 404)
        assert error["code"] == "model_not_found"
        assert "gpt-nothing" in error["message"] and MODEL in error["message"]


BODIES = {"nothing": b"", "half an object": b'{"prompt": "a"', "no JSON": b"prompt=a",
          "a list": b"[]", "a number": b"5", "null": b"null", "text": b'"prompt"',
          "not UTF-8": b'{"prompt": "\xff"}', "deep": b'{"prompt": ' + b"[" * 10 ** 5,
          "deep and whole": b'{"prompt": ' + b"[" * 10 ** 5 + b"]" * 10 ** 5 + b"}",
          "a number of 5000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_body_that_is_no_request(server, answer, body):
    """Holds a body that is not a JSON object to a 400 that speaks of the body."""
    assert "body" in refused(server, answer, COMPLETIONS, body)["message"]


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}], ids=["none", "text"])
def test_content_type(server, answer, headers):
    """Holds a body that does not say it is JSON to a 400 that names the header to send."""
    error = refused(server, answer, COMPLETIONS, json.dumps({"prompt": "a"}), headers=headers)
    assert "content-type: application/json" in error["message"]


def test_routes(server, answer):
    """Holds an unknown path to a 404 and a wrong method to a 405, both in OpenAI's format."""
    for path, body, status in (("/v1/nothing", None, 404), ("/v1/nothing", {}, 404),
                               (COMPLETIONS, None, 405), (CHAT, None, 405), ("/health", {}, 405)):
        refused(server, answer, path, body, status)


# --------------------------------------------------------------------------------------------------
# Texts out of the ordinary


def test_prompt_longer_than_the_context(server, answer, tokenizer):
    """Holds a prompt beyond the context to a 400 with OpenAI's code, and both lengths in it."""
    long = "the " * 5000
    messages = [{"role": "user", "content": long}]
    plain, chat = len(tokenizer.encode(long)), len(tokenizer.chat(messages))
    assert plain > 4096 and chat > plain
    for path, body, count in ((COMPLETIONS, {"prompt": long}, plain),
                              (COMPLETIONS, {"prompt": ["a", long]}, plain),
                              (CHAT, {"messages": messages}, chat)):
        error = refused(server, answer, path, body)
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"] and str(count) in error["message"]


def test_prompt_longer_than_the_pool(small):
    """Holds a request to the pool's size, to the token: one that fits runs, one more is refused."""
    context, prompt = POOL * PAGE, [5] * 40
    greedy = text_of(small.complete(PROMPT))
    full = small.complete(prompt, max_tokens=context - 40)
    assert full["usage"]["total_tokens"] == context
    for fields in ({"prompt": prompt, "max_tokens": context - 39},
                   {"prompt": [5] * context, "max_tokens": 1}):
        error = refused(small, greedy, COMPLETIONS, fields)
        assert error["code"] == "context_length_exceeded"
        assert str(context) in error["message"] and str(len(fields["prompt"])) in error["message"]


def test_chat_may_fill_the_context(small):
    """Holds a chat that names no limit to all the room that the context leaves, and no more."""
    status, reply = small.ask(CHAT, {"messages": MESSAGES, "ignore_eos": True})
    assert status == 200
    assert reply["usage"]["total_tokens"] == POOL * PAGE
    assert reply["choices"][0]["finish_reason"] == "length"


WORDS = {"letters": "a" * 300_000, "spaces": " " * 1_000_000, "lines": "\n" * 300_000,
         "signs": "^" * 300_000, "digits": "7" * 300_000, "two bytes each": "é" * 100_000}


@pytest.mark.parametrize("word", WORDS.values(), ids=WORDS)
def test_very_long_word(server, answer, word):
    """Holds a single endless word to the same refusal as any prompt that is too long."""
    for path, body in ((COMPLETIONS, {"prompt": word}),
                       (CHAT, {"messages": [{"role": "user", "content": "a" + word + "a"}]})):
        refused(server, answer, path, body)


ODD = {"surrogate": "\\ud800", "surrogate inside": "a\\udfffb", "nul": "\\u0000",
       "controls": "\\u0000\\u0001\\u001b[2J\\u007f", "lines": "\\r\\n\\u2028\\u0085",
       "byte order mark": "\\ufeff"}


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_odd_characters(server, answer, text):
    """Holds characters that are no text, wherever a request has room for them, to an answer or a
    refusal, never a failure."""
    for path, body in ((COMPLETIONS, '{"prompt": "%s", "max_tokens": 2}'),
                       (COMPLETIONS, '{"prompt": ["%s"], "max_tokens": 2}'),
                       (COMPLETIONS, '{"prompt": "a", "max_tokens": 2, "stop": "%s"}'),
                       (COMPLETIONS, '{"prompt": "a", "model": "%s"}'),
                       (COMPLETIONS, '{"prompt": "a", "max_tokens": 2, "%s": 1}'),
                       (CHAT, '{"messages": [{"role": "user", "content": "%s"}], "max_tokens": 2}'),
                       (CHAT, '{"messages": [{"role": "%s", "content": "a"}], "max_tokens": 2}')):
        status, reply = server.ask(path, body % text)
        assert status in (200, 400, 404), (body, status, reply)
    assert text_of(server.complete(PROMPT)) == answer


@pytest.mark.parametrize("text", ["Größe naïve", "日本語の文", "🎉👩‍👩‍👧", "e\u0301 a\u030a",
                                  "مرحبا", "\ttab  two"])
def test_unicode_prompt(server, tokenizer, text):
    """Holds a text to the ids that the tokenizer gives it, and those ids to the text."""
    ids = tokenizer.encode(text)
    normal = unicodedata.normalize("NFC", text) if tokenizer.nfc else text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == normal
    by_text, by_ids = server.complete(text), server.complete(ids)
    assert by_text["usage"]["prompt_tokens"] == len(ids)
    assert text_of(by_text) == text_of(by_ids)


def test_special_tokens_in_a_message(server, answer):
    """Holds special tokens written out in a prompt, a message or a role to an answer."""
    special = [token["content"] for token in
               json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]]
    assert special
    for text in (*special, "".join(special), f"a {special[-1]}b"):
        for path, body in ((COMPLETIONS, {"prompt": text}),
                           (CHAT, {"messages": [{"role": "user", "content": text}]}),
                           (CHAT, {"messages": [{"role": text, "content": "hello"}]})):
            status, reply = server.ask(path, {**body, "max_tokens": 2})
            assert status == 200, (body, reply)
    assert text_of(server.complete(PROMPT)) == answer


EXTREMES = {"seed of 4300 digits": {"seed": int("9" * 4300), "n": 2},
            "top_k beyond floats": {"top_k": 10 ** 400},
            "temperature tiny": {"temperature": 1e-300}, "temperature huge": {"temperature": 1e308},
            "top_p 0": {"top_p": 0}, "min_p 1": {"min_p": 1}, "top_k huge": {"top_k": 2 ** 70},
            "stop long": {"stop": "x" * 100_000}}


@pytest.mark.parametrize("fields", EXTREMES.values(), ids=EXTREMES)
def test_extreme_values_do_not_end_the_server(small, fields):
    """Holds values at the far end of what a type can hold to an answer or a refusal, and a server
    that lives on. (A seed of 4300 digits once ended it: one more digit cannot be printed.)"""
    greedy = text_of(small.complete(PROMPT))
    status, reply = small.ask(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "temperature": 1,
                                            **fields})
    assert status in (200, 400), reply
    assert text_of(small.complete(PROMPT)) == greedy


# --------------------------------------------------------------------------------------------------
# Clients that leave


def alone(server):
    """Whether the engine computes this function's own request alone, in steps of one token."""
    begun = len(server.steps())
    server.complete(PROMPT)
    return any(" 1 tokens: 0 prefill, 1 decode" in line.text for line in server.steps()[begun:])


@ENDPOINTS
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_client_that_leaves_is_forgotten(server, answer, chat, stream):
    """Holds the engine to decode no more for a client two seconds after it left, be it in the
    middle of a stream or waiting for the whole answer."""
    begun = len(server.steps())
    body = {"prompt": PROMPT, "messages": MESSAGES, "max_tokens": 3000, "ignore_eos": True,
            "stream": stream, "n": 2}
    body.pop("prompt" if chat else "messages")
    connection = server.send(CHAT if chat else COMPLETIONS, body)
    response = None
    try:
        if stream:
            response = connection.getresponse()
            response.read(400)
        wait_for(lambda: len(server.steps()) > begun + 5, 20, "some steps of it")
    finally:
        if response:
            response.close()
        connection.close()
    wait_for(lambda: alone(server), 2, "the engine forgets it")
    assert text_of(server.complete(PROMPT)) == answer


def test_client_that_leaves_the_queue(small):
    """Holds a request that waits for its turn to never run once its client has gone: two wait
    behind a long one, the first of them leaves, then only the second is ever computed."""
    begun = len(small.steps())

    def ran(tokens):
        return [line for line in small.steps()[begun:] if f": {tokens} prefill" in line.text]
    ask = lambda length, **fields: small.send(COMPLETIONS, {
        "prompt": [length] * length, "max_tokens": 3, "ignore_eos": True, **fields})
    long = ask(21, max_tokens=POOL * PAGE - 21, n=100)
    try:
        wait_for(lambda: ran(21), 20, "the long one runs")
        leaves, stays = ask(37), ask(38)
        time.sleep(0.3)                                  # both have reached the queue
        leaves.close()
        time.sleep(0.3)
        assert not ran(37) and not ran(38), "the long one ended too early to have anybody wait"
        long.close()
        assert stays.getresponse().status == 200
        stays.close()
    finally:
        long.close()
    assert ran(38) and not ran(37)


# --------------------------------------------------------------------------------------------------
# The parts of it that need no server


def test_null_is_the_default():
    """Holds a body of nulls to the sampling parameters of an empty one."""
    nulls = {name: None for name in ("max_tokens", "min_tokens", "stop_token_ids",
                                     "temperature", "top_p", "top_k", "min_p", "seed", "stop", "n",
                                     "stream", "ignore_eos", "echo", "logit_bias", "tools")}
    plain = CompletionBody(prompt="a").sampling()
    assert plain == CompletionBody(prompt="a", **nulls).sampling() == SamplingParams()
    chat = ChatBody(messages=MESSAGES, **nulls).sampling()
    assert chat == plain


def test_body_reaches_the_sampler():
    """Holds each field of a body to its sampling parameter, one stop string to a list of one."""
    body = CompletionBody(prompt="a", temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3,
                          stop="end", ignore_eos=True, logprobs=2, max_tokens=5, min_tokens=4,
                          stop_token_ids=[8])
    assert body.sampling() == SamplingParams(
        max_tokens=5, min_tokens=4, stop_token_ids=[8],
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=("end",),
        ignore_eos=True, logprobs=2)
    assert CompletionBody(prompt="a", stop=["x", "y"]).sampling().stop == ("x", "y")
    for field, value in UNSUPPORTED.items():
        with pytest.raises(UserError, match=field):
            CompletionBody(prompt="a", **{field: value}).sampling()


def asgi(app, path, body, method="POST"):
    """One request to the app itself, without a server; returns (status, answer)."""
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1",
             "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "scheme": "http",
             "headers": [(b"content-type", b"application/json")], "client": None, "server": None}
    request = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    replies = []

    async def receive():
        return request.pop() if request else {"type": "http.disconnect"}

    async def send(message):
        replies.append(message)

    async def call():
        try:
            await app(scope, receive, send)
        except RuntimeError:                             # told to the log as well
            pass
    asyncio.run(call())
    start, *rest = replies
    return start["status"], b"".join(message.get("body", b"") for message in rest)


def test_a_fault_of_ours_is_a_500_in_openais_format():
    """Holds an exception that nobody foresaw to OpenAI's format: its client reads nothing else."""
    def fault(*arguments):
        raise RuntimeError("a fault of ours")
    engine = SimpleNamespace(tokenizer=RawTokens(Config()), refusal=None, admissible=fault,
                             outputs={}, inbox=[], max_model_len=9,
                             options=SimpleNamespace(max_seqs=4))
    status, raw = asgi(Api(engine, "name").app(), COMPLETIONS, {"prompt": [1]})
    assert status == 500
    assert json.loads(raw)["error"]["type"] == "server_error", raw


def test_health_is_that_of_the_last_step():
    """Holds /health to a 200 only if a step or an idle tick has ended in the last few seconds."""
    for age, refusal, status, said in ((0, None, 200, "ok"), (5, None, 200, "ok"),
                                       (7, None, 503, "slow"), (0, "a reason", 503, "a reason")):
        engine = SimpleNamespace(tokenizer=RawTokens(Config()), refusal=refusal, IDLE_TICK=2.0,
                                 beat=time.monotonic() - age)
        found, raw = asgi(Api(engine, "name").app(), "/health", None, "GET")
        assert (found, json.loads(raw)) == (status, {"status": said})


def test_failure_is_openais():
    """Holds an error's type to its status: the client's fault below 500, ours from there on."""
    for status, kind in ((400, "invalid_request_error"), (404, "invalid_request_error"),
                         (500, "server_error"), (503, "server_error")):
        assert Failure(status, "why", "code").body == {
            "error": {"message": "why", "type": kind, "param": None, "code": "code"}}


def test_logprobs_of_samples():
    """Holds both formats of logprobs to samples whose tokens, texts and order are known."""
    tokenizer = RawTokens(Config())
    output = SimpleNamespace(tokenizer=tokenizer, offset=0)
    samples = [Sample(17, -0.5, [(17, -0.5), (4, -1.5)]), Sample(4, -2.0, [(9, -0.1)])]
    body = CompletionBody(prompt="a")
    assert body.likelihoods(output, samples) == {
        "tokens": ["17 ", "4 "], "token_logprobs": [-0.5, -2.0], "text_offset": [0, 3],
        "top_logprobs": [{"17 ": -0.5, "4 ": -1.5}, {"9 ": -0.1}]}
    assert body.likelihoods(output, samples)["text_offset"] == [5, 8], "they go on from there"
    first, second = ChatBody(messages=MESSAGES).likelihoods(output, samples)["content"]
    assert first == {"token": "17 ", "logprob": -0.5, "bytes": list(b"17 "), "top_logprobs": [
        {"token": "17 ", "logprob": -0.5, "bytes": list(b"17 ")},
        {"token": "4 ", "logprob": -1.5, "bytes": list(b"4 ")}]}
    assert [one["token"] for one in second["top_logprobs"]] == ["9 "]


class Bytes:
    """A tokenizer whose token i is the byte i: characters can be cut anywhere."""
    eos, decoder = frozenset(), Tokenizer.decoder

    def token_bytes(self, token):
        return bytes([token])


def test_half_characters_wait():
    """Holds a character cut over tokens to being shown once, when whole, and half a one at the end
    of a text to the sign for what cannot be read."""
    text = "aé🎉"
    output = Output(0, [1], SamplingParams(max_tokens=len(text.encode()) + 1), Bytes())
    shown = [output.push(Sample(byte, None, None)).text for byte in text.encode()]
    assert shown == ["a", "", "é", "", "", "", "🎉"]
    last = output.push(Sample("é".encode()[0], None, None))
    assert (last.text, last.finish, output.text) == ("\ufffd", "length", text + "\ufffd")
    half = {"token": "\ufffd", "logprob": -1.0, "bytes": [0xc3]}
    found = ChatBody(messages=MESSAGES).likelihoods(output, [Sample(0xc3, -1.0, [(0xc3, -1.0)])])
    assert found["content"] == [{**half, "top_logprobs": [half]}]


def test_usage_counts_every_choice():
    """Holds usage to the prompt once for each prompt and the output of all choices."""
    outputs = [SimpleNamespace(prompt=prompt, tokens=tokens, drafted=2, accepted=1)
               for prompt, tokens in
               (([5] * 4, [1, 2, 3]), ([5] * 4, [4]), ([6] * 3, [7]), ([6] * 3, []))]
    assert CompletionBody(prompt="a", n=2).usage(outputs) == {
        "prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12,
        "completion_tokens_details": {"accepted_prediction_tokens": 4,
                                      "rejected_prediction_tokens": 4}}


def test_texts_are_encoded_in_a_thread_of_their_own():
    """Holds a long text to keep neither the other calls waiting nor the engine."""
    threads = []

    class Slow(RawTokens):
        def encode(self, text):
            threads.append(threading.get_ident())
            return super().encode(text)
    api = SimpleNamespace(tokenizer=Slow(Config.random("")), _admit=lambda body, choices: None)
    for body in (CompletionBody(prompt=["1 2", "3"]), EmbeddingBody(input=["1 2", "3"])):
        assert asyncio.run(Api._encode(api, body)) == [[1, 2], [3]]
    assert len(threads) == 4 and threading.get_ident() not in threads
