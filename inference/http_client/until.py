"""Runs what asks a server, until it is done or has to end before."""

import asyncio
from collections.abc import Awaitable, Callable

import uvloop

_LOOK_EVERY_S = 0.1


def run(working: Awaitable[None], has_enough: Callable[[], bool]) -> bool:
    """Whether `working` ended before `has_enough`, which also notices interrupts: uvloop may lose
    them.
    """
    return uvloop.run(_until(working, has_enough))


async def _until(working: Awaitable[None], has_enough: Callable[[], bool]) -> bool:
    task = asyncio.ensure_future(working)
    while not task.done():
        await asyncio.wait([task], timeout=_LOOK_EVERY_S)
        if has_enough() and not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
    task.result()
    return True
