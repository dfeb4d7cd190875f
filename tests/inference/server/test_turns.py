"""A request that is large, and valid, leaves others their turns."""

import asyncio
import json
import time

import numpy as np

from inference.server import text_processor
from inference.server.endpoints import embeddings
from inference.server.protocol import parse
from inference.server.protocol.embeddings import Embedding, EmbeddingRequest
from inference.server.protocol.fields import CompletionRequest
from inference.server.text_processor import TextProcessor
from tests.inference.server.fake_engine import tokenizer


def turns(work) -> int:
    """That others have while something is awaited."""

    async def main():
        count = 0

        async def others():
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        await work()
        task.cancel()
        return count

    return asyncio.run(main())


def test_many_short_texts_are_encoded_with_turns_for_others():
    own = TextProcessor(1000, tokenizer(), None)

    async def encode():
        for _ in range(100):
            await own.encode("a" * 500, "input")

    assert turns(encode) >= 100 * 500 / text_processor._INLINE_CHARS

    async def encode_empty():
        for _ in range(200):
            await own.encode("", "input")

    assert turns(encode_empty) >= 10


def test_many_vectors_are_told_with_turns_for_others():
    data = np.ones(4, "<f4").tobytes()

    async def tell():
        found = await embeddings._encoded([data] * 50, EmbeddingRequest(input="a"))
        assert json.loads(bytes(found[7])) == {
            "index": 7, "embedding": [0.5] * 4, "object": Embedding(0, []).object,
        }  # fmt: skip

    assert turns(tell) >= 50


def test_a_million_numbers_take_no_longer_than_to_be_decoded():
    """Within a few times: the first, which comes nearest to them, is timed more than once."""

    def read(body):
        parsed = parse.parse(body, CompletionRequest)
        try:
            parse.prompts(parsed.request.prompt)
        except parse.ApiError as error:
            assert error.status == 400

    def seconds(function, body):
        start = time.process_time()
        function(body)
        return time.process_time() - start

    for number, times in ((b"1", 3), (b"1.0", 1), (b"[1]", 1)):
        body = b'{"prompt": [' + (number + b",") * 10**6 + number + b"]}"
        decoded_s, read_s = (
            min(seconds(function, body) for _ in range(times)) for function in (json.loads, read)
        )
        assert read_s < 4 * decoded_s


def test_whole_numbers_are_whole_in_lists_of_lists():
    parsed = parse.parse(b'{"prompt": [[1.0, 2], [3.0]]}', CompletionRequest)
    assert parse.prompts(parsed.request.prompt) == [[1, 2], [3]]
