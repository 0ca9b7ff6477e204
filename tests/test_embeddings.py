"""Embeddings: the vectors of every layout beside transformers', and the route for them.

The engine part runs the engines of all layouts of 1, 2 and 4 ranks in one world; each embeds
the same texts, in steps so small that some texts are cut into chunks and some lie in two slices.
"""
import base64
import json

import openai
import pytest
import torch
import torch.nn.functional as F
from common import factorizations, load, random_texts, save, world, write_checkpoint
from server import Server, needs_proc

from checks import checked
from model import Config, SamplingParams
from serve import Engine, Pooling, UserError
from shift import connect

SPEC = "dim=48,layers=2,heads=8,kv_heads=2,head_dim=12,ffn=64,vocab=101,max_len=64"
SMALL = dict(model=f"random:{SPEC}", threshold="20", max_step_tokens=24, max_seqs=4, kv_blocks=40,
             block_size=4)
LENGTHS = (9, 1, 30, 17, 2, 40, 5, 11)
KINDS = "mean", "last", "first"
JOBS = [(P, sp, tp, mode) for P in (1, 2, 4) for sp, tp in factorizations(P)
        for mode in ("shift", "sp") if mode == "shift" or sp > 1]


def layouts_world(root):
    rank, found = connect(), {}
    texts = random_texts(LENGTHS, 101)
    for P, sp, tp, mode in JOBS:
        engine = checked(Engine(range(rank // P * P, rank // P * P + P), sp=sp, tp=tp, mode=mode,
                                explain=2, **SMALL))         # every collective has its words
        for kind in KINDS:
            found[P, sp, tp, mode, kind] = engine.embed(texts, kind)
        found[P, sp, tp, mode, "short"] = engine.embed(texts, dimensions=7)
        blocks = engine.scheduler.blocks
        assert len(blocks.empty) == blocks.num_blocks and not blocks.block_of, "KV was kept"
        if (engine.rank == 0) != (found[P, sp, tp, mode, "mean"] is not None):
            raise AssertionError("the vectors are rank 0's")
        if mode == "shift" and P > 1:
            assert {*engine.steps} == {"base", "shift"}, "the texts should cross the threshold"
    save(root, found)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    """{(layout, kind): vectors of rank 0}."""
    root = tmp_path_factory.mktemp("embeddings")
    assert world(layouts_world, 4, root) == 0
    return load(root, 4)[0]


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    from transformers import AutoModelForCausalLM
    directory = tmp_path_factory.mktemp("oracle")
    write_checkpoint(directory, Config.random(SPEC))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model.model(torch.tensor([text])).last_hidden_state[0]
                for text in random_texts(LENGTHS, 101)]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "P{}-sp{}-tp{}-{}".format(*job))
def test_vectors_are_transformers_pooled(vectors, hidden, job):
    """Each layout and pooling: Hugging Face's last hidden states, pooled, to 1e-5."""
    pools = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "first": lambda h: h[0],
             "short": lambda h: h.mean(0)[:7]}
    for kind, pool in pools.items():
        want = torch.stack([F.normalize(pool(h), dim=0) for h in hidden])
        got = vectors[*job, kind]
        assert got.shape == want.shape and got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def mixed_world():
    """Texts to embed and to continue share the steps, and one of each is cancelled."""
    engine = checked(Engine(**SMALL))
    texts, greedy = random_texts(LENGTHS, 101), SamplingParams(max_tokens=12, temperature=0)
    alone = engine.generate(texts[:4], greedy), engine.embed(texts)
    outputs = []
    if engine.rank == 0:
        for text in texts[:4]:
            outputs += engine.submit(text, greedy), engine.submit(text, Pooling())
        again = [engine.submit(texts[0], Pooling()) for _ in range(3)]
        engine.cancel(again[1])
        engine.cancel(engine.submit(texts[0], greedy))
        engine.close()
    engine.run()
    if engine.rank == 0:
        assert [one.tokens for one in outputs[::2]] == [one.tokens for one in alone[0]]
        for i, one in enumerate(outputs[1::2]):
            assert isinstance(one.vector, bytes)
            got = torch.frombuffer(bytearray(one.vector), dtype=torch.float32)
            torch.testing.assert_close(got, alone[1][i], rtol=0, atol=1e-5)
        assert [one.finish for one in again] == ["stop", "cancelled", "stop"]
    assert engine.scheduler.blocks.available == engine.num_blocks


def test_texts_to_embed_and_to_continue_share_steps():
    assert world(mixed_world, 2) == 0


def preempted_world():
    """A text in chunks loses its blocks to one that is continued, and begins again. And --explain 2
    has words for each collective."""
    engine = checked(Engine(**{**SMALL, "kv_blocks": 11, "max_step_tokens": 2, "threshold": "1"},
                            explain=2))
    [text] = random_texts((30,), 101)
    for kind in KINDS:
        alone, before = engine.embed([text], kind), engine.scheduler.preemptions
        if engine.rank == 0:
            engine.submit([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
            output = engine.submit(text, Pooling(kind))
            engine.close()
        engine.run()
        engine.closing = False
        assert engine.scheduler.preemptions > before and engine.steps["base"] > 10
        if engine.rank == 0:
            got = torch.frombuffer(bytearray(output.vector), dtype=torch.float32)
            torch.testing.assert_close(got, alone[0], rtol=0, atol=1e-5)


def test_a_preempted_text_begins_again(capfd):
    assert world(preempted_world, 2) == 0
    assert "pool      all_reduce" in capfd.readouterr().out


def values_world():
    engine = Engine(**SMALL)
    for dimensions in (0, -3, 49):
        with pytest.raises(UserError, match=f"dimensions = {dimensions} must be between 1 and the"):
            engine.embed([[5, 6]], dimensions=dimensions)
    assert engine.embed([[5, 6]], dimensions=48).shape == (1, 48)


def test_pooling_names_the_value():
    with pytest.raises(UserError, match="'sum' is none of mean, last, first"):
        Pooling("sum")
    assert world(values_world, 1) == 0


# --------------------------------------------------------------------------------------------------
# The route


@pytest.fixture(scope="module")
def server():
    with Server("--nproc", 2, "--threshold", 16, "--kv-blocks", 600, checked=True).ready() as up:
        yield up
        assert up.stop() == 0


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300,
                       http_client=openai.DefaultHttpxClient(trust_env=False)) as client:
        yield client


@needs_proc
def test_openai_client_gets_the_same_from_both_formats(client):
    """The client asks for base64 unless told otherwise; texts and token ids; order; usage."""
    texts = [f"A story about {word}." for word in ("a fox", "the sea and a very small boat", "me")]
    make = lambda **more: client.embeddings.create(model="assets/tiny", **more)
    packed, plain = make(input=texts), make(input=texts, encoding_format="float")
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert [one.index for one in packed.data] == [0, 1, 2]
    for one in plain.data:
        assert len(one.embedding) == 256
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-5)
    single = make(input=texts[1])
    assert single.data[0].embedding == pytest.approx(packed.data[1].embedding, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > single.usage.prompt_tokens > 5
    short = make(input=texts[1], dimensions=8).data[0].embedding
    head = torch.tensor(single.data[0].embedding[:8])
    assert short == pytest.approx(F.normalize(head, dim=0).tolist(), abs=1e-5)
    ids = make(input=[[5, 6, 7], [5, 6, 7, 8]])
    assert ids.usage.prompt_tokens == 7 and len(ids.data) == 2
    assert make(input=[5, 6, 7]).data[0].embedding == pytest.approx(ids.data[0].embedding, abs=1e-5)


@needs_proc
def test_raw_answer(server):
    """base64 is little-endian float32; pooling is this server's own field."""
    status, reply = server.ask("/v1/embeddings", {
        "input": ["a", "b c d"], "encoding_format": "base64", "pooling": "last"})
    assert status == 200 and reply["object"] == "list"
    raw = [base64.b64decode(one["embedding"]) for one in reply["data"]]
    assert [len(one) for one in raw] == [1024, 1024] and raw[0] != raw[1]
    status, reply = server.ask("/v1/embeddings", {"input": "b c d", "pooling": "first"})
    assert status == 200 and len(json.dumps(reply["data"][0]["embedding"])) > 256


@needs_proc
def test_chunks_of_texts_need_no_reader():
    """256 texts leave 256 chunks in each step, while larger bodies keep the HTTP thread busy: no
    call is taken for a stream that nobody reads."""
    with Server("--nproc", 2, "--threshold", 16, "--max-step-tokens", 256, "--kv-blocks", 4096,
                "--model", "random:dim=16,layers=1,heads=2,kv_heads=2,ffn=32,vocab=256,max_len=256"
                ).ready() as server:
        body = json.dumps({"input": [[5] * 120] * 256})
        connection = server.send("/v1/embeddings", body)
        large, seen = json.dumps({"input": [[5] * 1000] * 2000}, separators=",:"), []
        for _ in range(4):
            seen.append(server.ask("/v1/embeddings", large)[0])
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200 and len(answer["data"]) == 256, answer
        assert seen == [400] * 4
        assert server.stop() == 0


@needs_proc
@pytest.mark.parametrize("fields, said", [
    ({}, "input"), ({"input": ""}, "empty"), ({"input": ["a", ""]}, "empty"),
    ({"input": []}, "empty"),
    ({"input": 7}, "a list of token ids"), ({"input": [1, "a"]}, "a list of token ids"),
    ({"input": [4096]}, "4096"),
    ({"input": [-1]}, "-1"), ({"input": "a", "dimensions": 257}, "256"),
    ({"input": "a", "dimensions": 0}, "dimensions"), ({"input": "a", "pooling": "sum"}, "sum"),
    ({"input": "a", "encoding_format": "hex"}, "hex"), ({"input": "a", "modle": "x"}, "modle"),
    ({"input": [5] * 5000}, "maximum context length"), ({"input": "a", "model": "gpt"}, "gpt")])
def test_bad_bodies_are_refused_in_one_line(server, fields, said):
    status, reply = server.ask("/v1/embeddings", fields)
    assert status in (400, 404) and said in reply["error"]["message"], reply
    assert "\n" not in reply["error"]["message"]
