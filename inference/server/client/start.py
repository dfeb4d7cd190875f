"""Starts an engine and waits until it is ready."""

import asyncio

from inference.server.client.engine_client import EngineClient, EngineFailed, State


async def start(client: EngineClient) -> "asyncio.Task[None]":
    """Returns the task of `EngineClient.run` once requests are served; raises `EngineFailed`."""
    is_ready = asyncio.Event()

    def note(state: State) -> None:
        if state is State.READY:
            is_ready.set()

    client.on_state = note
    running = asyncio.create_task(client.run())
    waiting = asyncio.create_task(is_ready.wait())
    try:
        await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        raise
    finally:
        waiting.cancel()
    if running.done():
        running.result()
        raise EngineFailed("the engine ended before it was ready")
    return running
