"""page.py: what the server tells those who watch it, and takes from the live page (index.html).

    GET /                    the page itself
    GET /metrics             for Prometheus (metrics.py)
    GET /steps               server-sent events: who owns what, then each step as it happens
    GET /steps/{number}      the collectives of one step, of every rank
    POST /threshold          {"threshold": N or "auto"}: the switch from the next step on

All of it asks for the key, if there is one, but the page itself, which then asks its reader.
"""
import asyncio
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, StreamingResponse


class Threshold(BaseModel, strict=True):
    threshold: Annotated[int, Field(ge=0, lt=2 ** 63)] | Literal["auto"]


def add_page(app, api):
    """The routes, on serve.py's `Api`. What all ranks must do goes through `Engine.ask`."""
    engine = api.engine

    @app.get("/", include_in_schema=False)
    async def page():
        return FileResponse(Path(__file__).with_name("index.html"))

    @app.get("/metrics")
    async def metrics():
        return api.metrics.response()

    @app.get("/steps")
    async def steps():
        return StreamingResponse(watch(api), media_type="text/event-stream")

    @app.get("/steps/{number}")
    async def collectives(number: Annotated[int, Field(lt=2 ** 63)]):
        ranks = await asyncio.wrap_future(engine.ask("collectives", number))
        if None in ranks:
            raise HTTPException(404, f"step {number} is not kept: only the last that have run are")
        return {"step": number, "ranks": ranks}

    @app.post("/threshold")
    async def threshold(body: Threshold):
        if api.flags.fixed_threshold:
            raise HTTPException(403, "the server runs with --fixed-threshold")
        switch = await asyncio.wrap_future(engine.ask("threshold", body.threshold))
        return {"threshold": switch.threshold, "switch": str(switch)}


async def watch(api):
    """Who owns what; then, ten times a second, the steps that are new and the state after them."""
    pack = lambda data: f"data: {json.dumps(data)}\n\n"
    yield pack({"hello": hello(api)})
    seen, last = 0, None
    while not api.engine.refusal:
        new = [step for step in [*api.engine.trace] if step.number > seen]
        seen, now = new[-1].number if new else seen, state(api.engine)
        if new or now != last:
            yield pack({"steps": [(*step[:5], round(step.milliseconds, 2)) for step in new], **now})
        last = now
        await asyncio.sleep(0.1)


def hello(api):
    engine, layout = api.engine, api.engine.layout
    blocks = [layout.block(rank) for rank in range(layout.ranks)]
    return {"model": api.name, "ranks": layout.ranks, "sp": layout.sp, "tp": layout.tp,
            "heads": layout.heads, "kv_heads": layout.kv_heads, "blocks": blocks,
            "q_heads": [[*layout.q_heads(block)] for block in blocks],
            "kv_heads_of": [[*layout.kv_heads_of(block)] for block in blocks],
            "shards": [[*layout.shard(rank)] for rank in range(layout.ranks)],
            "max_step_tokens": engine.options.max_step_tokens, "kv_blocks": engine.num_blocks,
            "block_size": engine.options.block_size, "fixed": api.flags.fixed_threshold}


def state(engine):
    scheduler = engine.scheduler
    return {"threshold": engine.switch.threshold, "switch": str(engine.switch),
            "waiting": len(scheduler.waiting), "running": len(scheduler.running),
            "kv": {"requests": {request.id: request.blocks for request in [*scheduler.running]},
                   "cached": [*scheduler.blocks.cached]}}
