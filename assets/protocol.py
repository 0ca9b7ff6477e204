"""protocol.py: OpenAI's HTTP API as data: the bodies of its requests, the form of its answers, its
errors; and the gate in front, for the key and the size of a body.

It knows JSON and pydantic, and nothing of the engine: serve.py's `Api` has the routes.
"""
import base64
import hmac
import itertools
import os
import time
from array import array
from dataclasses import fields, replace
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, create_model
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from model import Pooling, SamplingParams
from shift import UserError

Text = Annotated[str, Field(min_length=1, max_length=1000)]
Ids = Annotated[list[int], Field(fail_fast=True)]          # one error will do, out of a million
Prompts = Annotated[
    str | Annotated[list[str], Field(fail_fast=True)] | Ids
    | Annotated[list[Ids], Field(fail_fast=True)],
    Field(description="a text, a list of texts, a list of token ids, or a list of such lists")]


class Call(BaseModel, strict=True):
    """What all calls have in common. Types are strict: "5" is not a number."""
    model: str | None = None
    n: int | None = Field(None, ge=1, le=128)                # choices, of each prompt
    stream: bool | None = None

    def head(self, model):
        """What an answer, and each chunk of a streamed one, begins with."""
        prefix, whole, chunk = self.KIND
        return {"id": f"{prefix}-{os.urandom(12).hex()}", "created": int(time.time()),
                "object": chunk if self.stream else whole, "model": model}


class Body(Call, create_model("SamplingBody", **{f.name: (f.type | None, None)
                                                 for f in fields(SamplingParams)}),
           strict=True, extra="allow"):
    """What both kinds of completion have in common: all of SamplingParams, and null for a default.
    Each kind also knows the form of its answer."""
    stop: Text | Annotated[list[Text], Field(max_length=32, fail_fast=True)] | None = Field(
        None, description="a text or a list of at most 32 texts, of 1 to 1000 characters each")
    stop_token_ids: Annotated[Ids, Field(max_length=128)] | None = None
    stream_options: dict[str, bool] | None = None

    # Accepted at the value that changes nothing, refused at any other rather than ignored.
    UNSUPPORTED: ClassVar = {"echo": False, "best_of": 1, "suffix": "", "frequency_penalty": 0,
                             "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": {},
                             "tools": [], "tool_choice": "none", "functions": [],
                             "function_call": "none", "modalities": ["text"],
                             "response_format": {"type": "text"}, "skip_special_tokens": True}
    # What clients send that concerns the text of no answer. Anything else may be a slip of the pen.
    IGNORED: ClassVar = {"user", "metadata", "store", "service_tier", "safety_identifier",
                         "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}

    def sampling(self, room=None, **changes):
        """SamplingParams, which check the values. room: the tokens that the prompt leaves free."""
        for name in self.model_extra.keys() - self.IGNORED:
            value, plain = self.model_extra[name], self.UNSUPPORTED.get(name)
            if value is not None and name not in self.UNSUPPORTED:
                raise UserError(f"{name!r:.60} is no field of this request")
            if value is not None and value != plain:
                raise UserError(f"{name!r:.60} is not supported, only its default {plain!r}")
        given = {f.name: getattr(self, f.name) for f in fields(SamplingParams)} | changes
        given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def choices(self, room):
        """SamplingParams of each of the n choices: what differs is the seed."""
        params = self.sampling(room)
        return [params if params.seed is None else replace(params, seed=params.seed + i)
                for i in range(self.n or 1)]

    def answer(self, head, outputs):
        return {**head, "usage": self.usage(outputs), "choices": [
            self.choice(output, output.text, output.samples, output.finish)
            for output in outputs]}

    def usage(self, outputs):
        """The tokens, each prompt's only once, and what came of the drafts."""
        prompts = sum(len(output.prompt) for output in outputs[::self.n or 1])
        completions = sum(len(output.tokens) for output in outputs)
        drafted, accepted = (sum(getattr(output, name) for output in outputs)
                             for name in ("drafted", "accepted"))
        return {"prompt_tokens": prompts, "completion_tokens": completions,
                "total_tokens": prompts + completions, "completion_tokens_details": {
                    "accepted_prediction_tokens": accepted,
                    "rejected_prediction_tokens": drafted - accepted}}

    def choice(self, output, text, samples, finish):
        asked = output.params.logprobs is not None
        return {"index": output.index, **self.content(text), "finish_reason": finish,
                "logprobs": self.likelihoods(output, samples) if asked else None}


def as_list(prompt):
    """A prompt, or a list of them, as a list of them."""
    one = isinstance(prompt, str) or not prompt or isinstance(prompt[0], int)
    return [prompt] if one else prompt


class CompletionBody(Body):
    KIND: ClassVar = "cmpl", "text_completion", "text_completion"      # id, object, streamed object
    prompt: Prompts

    def prompts(self):
        return as_list(self.prompt)

    def encode(self, tokenizer, prompt):
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def content(self, text):
        return {"text": text}

    def likelihoods(self, output, samples):
        word = lambda token: output.tokenizer.token_bytes(token).decode(errors="replace")
        tokens = [word(one.token) for one in samples]
        *offsets, output.offset = itertools.accumulate(map(len, tokens), initial=output.offset)
        return {"tokens": tokens, "token_logprobs": [one.logprob for one in samples],
                "top_logprobs": [{word(token): p for token, p in one.top} for one in samples],
                "text_offset": offsets}


class Message(BaseModel, strict=True, extra="allow"):
    role: str
    content: str


class ChatBody(Body):
    KIND: ClassVar = "chatcmpl", "chat.completion", "chat.completion.chunk"
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def prompts(self):
        return [self.messages]

    def encode(self, tokenizer, prompt):
        return tokenizer.chat([message.model_dump() for message in prompt])

    def sampling(self, room=None):
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs needs logprobs = true")
        most = self.max_completion_tokens or self.max_tokens
        return super().sampling(max_tokens=room if most is None else most, logprobs=(
            self.top_logprobs or 0) if self.logprobs else None)

    def content(self, text):
        if self.stream:
            return {"delta": {"content": text}}
        return {"message": {"role": "assistant", "content": text}}

    def likelihoods(self, output, samples):
        def entry(token, logprob):
            raw = output.tokenizer.token_bytes(token)
            return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
        return {"content": [{**entry(one.token, one.logprob),
                             "top_logprobs": [entry(*pair) for pair in one.top]}
                            for one in samples]}


class EmbeddingBody(Call, extra="forbid"):
    """OpenAI's, and `pooling`."""
    KIND: ClassVar = "embd", "list", "list"
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)
    pooling: Literal["mean", "last", "first"] | None = None
    user: str | None = None
    n: ClassVar = 1
    stream: ClassVar = False

    def prompts(self):
        return as_list(self.input)

    encode = CompletionBody.encode

    def choices(self, room):
        return [Pooling(self.pooling or "mean", self.dimensions)]

    def answer(self, head, outputs):
        def numbers(vector):
            if self.encoding_format == "base64":
                return base64.b64encode(vector)
            return array("f", vector).tolist()
        tokens = sum(len(output.prompt) for output in outputs)
        return {**head, "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "data": [{"object": "embedding", "index": output.index,
                          "embedding": numbers(output.vector)} for output in outputs]}


class Failure(HTTPException):
    """An answer other than 200, in OpenAI's format."""

    def __init__(self, status, message, code=None, headers=None):
        super().__init__(status, message, headers)
        self.body = {"error": {"message": message, "param": None, "code": code, "type":
                               "invalid_request_error" if status < 500 else "server_error"}}
        self.response = JSONResponse(self.body, status, headers)

    @classmethod
    async def handle(cls, request, error):
        """The answer to any exception."""
        if isinstance(error, UserError):
            error = cls(400, str(error), getattr(error, "code", None))
        elif hasattr(error, "errors"):                       # FastAPI's, of pydantic's
            error = cls(400, cls._invalid(request, error.errors()[0]))
        elif not isinstance(error, HTTPException):           # uvicorn logs it
            error = cls(500, "internal error: the server's log has it")
        elif not isinstance(error, cls):
            error = cls(error.status_code, f"{request.url.path:.80}: {error.detail}",
                        headers=error.headers)
        return error.response

    @staticmethod
    def _invalid(request, first):
        """The first thing that pydantic finds wrong with a body, in words."""
        if "json" not in request.headers.get("content-type", ""):
            return "the body must be JSON, with the header content-type: application/json"
        if first["type"] == "json_invalid":
            return f"the body is not valid JSON: {first['ctx']['error']}"
        path, kinds = first["loc"][1:], (
            ChatBody.model_fields | CompletionBody.model_fields | EmbeddingBody.model_fields)
        wanted = kinds[path[0]].description if path and path[0] in kinds else None
        if wanted:                     # of several types: say them all, not what one of them lacks
            return f"{path[0]} must be {wanted}, not {first['input']!r:.60}"
        value = "" if first["type"] == "missing" else f" = {first['input']!r:.60}"
        return f"{'.'.join(map(str, path)) or 'body'}{value}: {first['msg']}"


class Gate:
    """In front of the app: nothing is parsed before the key and the size of the body are right."""
    MAX_BODY = 4 << 20                 # bytes

    def __init__(self, app, keys):
        self.app, self.keys = app, [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope, receive, send):
        given, app, size = dict(scope.get("headers", ())).get(b"authorization", b""), self.app, 0
        known = any([hmac.compare_digest(given, key) for key in self.keys])      # all: same time
        if self.keys and not known and scope.get("path", "/") not in ("/", "/health"):
            app = Failure(401, "this server wants a key: authorization: Bearer KEY",
                          "invalid_api_key", {"www-authenticate": "Bearer"}).response

        async def limited():
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.MAX_BODY:
                raise Failure(413, f"the body has more than {self.MAX_BODY} bytes")
            return message
        await app(scope, limited, send)
