"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer by itself."""

from starlette.responses import JSONResponse, Response

from inference.server.endpoints.envelope import whole
from inference.server.protocol import logprobs, parse, tools
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError
from inference.server.protocol.fields import DetokenizeRequest, TokenizeRequest
from inference.server.protocol.responses import Detokenized, Tokenized
from inference.server.service import Service
from inference.server.text_processor import TextProcessor


async def tokenize(service: Service, request: TokenizeRequest, caller: Caller) -> Response:
    """Encode a text or a conversation as token ids.

    Raises:
        ApiError: a field is wrong, or it takes too long.
    """
    service.adapter_of(request.model)
    async with caller.deadline.enforce():
        tokens = await _tokens(service.texts, request)
    spelled = None
    if request.return_token_strs:
        spelled = [logprobs.spelled(service.texts.tokenizer, token) for token in tokens]
    return whole(Tokenized(len(tokens), service.facts.max_context, tokens, spelled))


async def _tokens(texts: TextProcessor, request: TokenizeRequest) -> list[int]:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
    if request.messages is not None:
        begins, continues = tools.check_turn(request)
        offer, variables = tools.read(request), request.chat_template_kwargs or {}
        offered = None if offer is None else offer.tools
        return await texts.encode_chat(request.messages, begins, offered, variables, continues)
    assert request.prompt is not None
    return await texts.encode(request.prompt, "prompt", request.add_special_tokens is not False)


async def detokenize(service: Service, request: DetokenizeRequest, caller: Caller) -> Response:
    """Decode token ids to a text.

    Raises:
        ApiError: a field is wrong, or it takes too long.
    """
    service.adapter_of(request.model)
    tokens = parse.check_ids(request.tokens, service.facts.vocab_size, "tokens")
    async with caller.deadline.enforce():
        return whole(Detokenized(await service.texts.decode(tokens)))


async def tokenizer_info(service: Service) -> Response:
    """Retrieve the tokenizer's special tokens and chat template."""
    tokenizer = service.texts.tokenizer
    return JSONResponse({**tokenizer.special_tokens, "chat_template": tokenizer.template})
