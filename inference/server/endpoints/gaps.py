"""Completions that fill a gap: their prompts, and the tokens that end what fills it."""

import dataclasses

from configs.errors import InputError
from inference.request import SamplingParams
from inference.server.endpoints.answers import EncodedPrompt
from inference.server.protocol import sampling
from inference.server.protocol.errors import ApiError, invalid, unusable
from inference.server.protocol.fields import CompletionRequest
from inference.server.service import Service
from inference.text.infill import MISSING, Gap


def read(request: CompletionRequest) -> Gap | None:
    """The gap before a completion's `suffix`; None without a suffix.

    Raises:
        ApiError: 400, other fields do not go with a suffix.
    """
    if not request.suffix:
        if request.suffix_first is not None:
            raise invalid("suffix_first", "goes with a suffix")
        return None
    if not isinstance(request.prompt, str):
        raise invalid("suffix", "goes with one text as the prompt")
    if request.echo:
        raise invalid("suffix", "and echo exclude each other")
    return Gap(request.prompt, request.suffix, (), request.suffix_first)


async def encode(
    service: Service, request: CompletionRequest, gap: Gap, params: SamplingParams
) -> tuple[EncodedPrompt, set[int]]:
    """The prompt of a gap, and the end tokens that `params` does not have.

    Raises:
        ApiError: 400, the model does not fill gaps or has no such order, or the context does not
            hold the prompt.
    """
    writer, facts = service.texts.tokenizer.infill, service.facts
    if writer is None:
        raise ApiError(400, f"suffix: {MISSING}", "suffix", "unsupported")
    if request.truncation_side is not None:
        raise invalid("truncation_side", "does not go with a suffix: the ends away from the gap go")
    limit = sampling.prompt_limit(request, facts)
    add_special = request.add_special_tokens is not False
    try:
        num_marks = writer.num_marks(gap, add_special)
    except InputError as error:
        raise ApiError(400, str(error), "suffix_first", "invalid_value") from None
    if limit is not None and limit <= num_marks:
        why = f"leaves {limit} tokens, of which the marks around the gap take {num_marks}"
        raise invalid("truncate_prompt_tokens", why)
    tokens = await service.texts.encode_infill(gap, add_special, limit)
    ends = set() if params.ignore_eos else {*writer.layout.ends} - {*params.stop_token_ids}
    try:
        stop_token_ids = (*params.stop_token_ids, *sorted(ends))
        params = dataclasses.replace(params, stop_token_ids=stop_token_ids)
    except InputError as error:
        raise unusable("stop_token_ids", f"{error}, with {len(ends)} of this model's") from None
    return EncodedPrompt(*sampling.fit(request, params, tokens, facts)), ends
