"""OpenAI's asynchronous client: many at a time."""

import asyncio

import openai
import pytest

from tests.inference.server.fake_engine import reply

HOW = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture
def run(perch):
    def work(ask):
        async def whole():
            how = {"base_url": f"{perch.url}/v1", "api_key": "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**how) as client:
                return await ask(client)

        return asyncio.run(whole())

    return work


async def text_of(stream):
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def test_many_answers_at_a_time(run):
    async def ask(client):
        one = client.chat.completions.create
        return await asyncio.gather(*(one(**HOW, max_tokens=n) for n in range(1, 13)))

    assert [found.usage.completion_tokens for found in run(ask)] == list(range(1, 13))


def test_many_streams_at_a_time(run):
    async def ask(client):
        async def one(n):
            return await text_of(
                await client.chat.completions.create(**HOW, max_tokens=n, stream=True)
            )

        return await asyncio.gather(*map(one, (5, 10, 30, 60)))

    assert run(ask) == [bytes(reply(n)).decode(errors="replace") for n in (5, 10, 30, 60)]


def test_streams_that_are_left(run, parrot):
    async def ask(client):
        stream = await client.chat.completions.create(**HOW, stream=True)
        async for _ in stream:
            break
        await stream.close()
        return await client.completions.create(model="fake", prompt="a", max_tokens=1)

    assert run(ask).choices


def test_calls_and_helpers(run, parrot):
    parrot.says = CALL
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def ask(client):
        async with client.chat.completions.stream(**HOW, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            return kinds, await stream.get_final_completion()

    kinds, final = run(ask)
    assert "tool_calls.function.arguments.done" in kinds
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"a": 1}'


def test_raw_and_streamed_responses(run):
    async def ask(client):
        raw = await client.chat.completions.with_raw_response.create(**HOW, max_tokens=2)
        how = client.chat.completions.with_streaming_response
        async with how.create(**HOW, max_tokens=2, stream=True) as response:
            lines = [line async for line in response.iter_lines() if line]
        return raw.headers["content-type"], raw.parse(), lines

    kind, found, lines = run(ask)
    assert kind == "application/json" and found.usage.completion_tokens == 2
    assert lines[-1] == "data: [DONE]"


def test_errors_and_models(run):
    async def ask(client):
        with pytest.raises(openai.BadRequestError) as found:
            await client.chat.completions.create(**HOW | {"temperature": 9})
        return found.value.param, [model.id async for model in client.models.list()]

    assert run(ask) == ("temperature", ["fake"])
