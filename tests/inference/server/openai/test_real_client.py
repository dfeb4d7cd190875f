"""OpenAI's client before SmolLM2: what a model of its own mind writes keeps to what is asked."""

import subprocess
import sys
from pathlib import Path
from typing import Literal

import openai
import pydantic
import pytest

from tests import compiling
from tests.inference.server.running import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[4]
COMMAND = [
    *(sys.executable, "-m", "scripts.serve", "--model=smollm2-135m", "--port=0", "--nowarm_up"),
    *("--max_num_seqs=4", "--max_model_len=1024", "--set=engine.shapes.decode_rows=(4,)"),
    "--set=engine.shapes.prefill_chunks=(2,)",
]
HOW = {"model": "smollm2-135m", "max_tokens": 100, "messages": [
    {"role": "user", "content": "What is the weather in Paris, in celsius?"}]}  # fmt: skip


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "fahrenheit"]
    days: list[Literal[1, 2, 3]] = pydantic.Field(max_length=3)


class Time(pydantic.BaseModel):
    """The time in a zone."""

    hours_from_utc: Literal[-1, 0, 1]


TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Time)]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    environment = compiling.environment(tmp_path_factory.mktemp("serve") / "cache")
    with subprocess.Popen(
        COMMAND, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        url = process.stderr.readline().split()[0]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        try:
            wait_until(lambda: "is served" in process.stderr.readline(), 120)
            yield client.chat.completions
        finally:
            client.close()
            process.kill()


@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
def test_calls_that_have_to_come_are_of_their_schemas(real, temperature):
    named = {"type": "function", "function": {"name": "Time"}}
    for n, choice in enumerate(("required", named)):
        found = real.parse(**HOW, tools=TOOLS, tool_choice=choice, n=4, temperature=temperature,
                           seed=3, parallel_tool_calls=False)  # fmt: skip
        for each in found.choices:
            (call,) = each.message.tool_calls
            assert isinstance(call.function.parsed_arguments, Time if n else (Weather, Time))
            assert each.finish_reason == "tool_calls" and each.message.content is None


def test_a_stream_of_it_is_the_same(real):
    how = HOW | {"tools": TOOLS, "tool_choice": "required", "temperature": 1, "seed": 5}
    whole = real.parse(**how).choices[0].message
    with real.stream(**how) as stream:
        streamed = stream.get_final_completion().choices[0].message
    calls, others = ([c.function for c in m.tool_calls] for m in (whole, streamed))
    assert [c.arguments for c in calls] == [c.arguments for c in others] and calls


def test_what_it_writes_of_itself_is_text_or_calls(real):
    for seed in range(4):
        how = HOW | {"tools": TOOLS, "temperature": 1, "seed": seed}
        message = real.create(**how).choices[0].message
        calls = message.tool_calls or []
        assert message.content or calls
        assert {call.function.name for call in calls} <= {"Weather", "Time"}
        deltas = [chunk.choices[0].delta for chunk in real.create(**how, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
        pieces = [call for delta in deltas for call in delta.tool_calls or ()]
        told = [piece.function.name for piece in pieces if piece.function.name]
        assert told == [call.function.name for call in calls]
        arguments = "".join(piece.function.arguments for piece in pieces)
        assert arguments == "".join(call.function.arguments for call in calls)


def test_answers_of_a_model_are_parsed(real):
    found = real.parse(**HOW, response_format=Weather, n=4, temperature=1.5, seed=1)
    assert all(isinstance(each.message.parsed, Weather) for each in found.choices)


def test_an_answer_goes_on_without_some_words(real):
    messages = [*HOW["messages"], {"role": "assistant", "content": "It is "}]
    how = HOW | {"messages": messages, "temperature": 0}
    extra = {"continue_final_message": True, "bad_words": ["Paris", "elsius", "degree"]}
    text = real.create(**how, extra_body=extra).choices[0].message.content
    assert text and not any(word in text for word in extra["bad_words"])
