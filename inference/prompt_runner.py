"""What an engine makes of prompts: their continuations, and what `prompt_reader` reads of them."""

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items

from configs.errors import InputError
from inference.outputs import Completion, RequestOutput
from inference.prompt_reader import PromptReader
from inference.request import SamplingParams
from inference.request_batch import Prompt, RequestBatch


class PromptRunner(PromptReader):
    """Continues prompts by the requests of an engine."""

    def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] = SamplingParams(),
        on_output: Callable[[RequestOutput], None] = lambda output: None,
    ) -> list[Completion]:
        """Continues every prompt and returns the completions in the order of the prompts.

        Raises:
            InputError: as `add_request`; then nothing was queued.
        """
        completions = dict(self.as_completed(prompts, params, on_output))
        return [completions[index] for index in range(len(prompts))]

    def as_completed(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] = SamplingParams(),
        on_output: Callable[[RequestOutput], None] = lambda output: None,
    ) -> Iterator[tuple[int, Completion]]:
        """Continues every prompt and yields (index of the prompt, completion) as each ends; leaving
        the loop early aborts the others.

        Raises:
            InputError: as `add_request`; then nothing was queued.
        """
        params = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(params) != len(prompts):
            raise InputError(f"{len(prompts)} prompts do not go with {len(params)} SamplingParams")
        with RequestBatch(self, prompts, params) as batch:
            yield from batch.completions(on_output)

    def stream(
        self, prompt: Prompt, params: SamplingParams = SamplingParams()
    ) -> Generator[RequestOutput, None, None]:
        """Continues one prompt, yielding its outputs; leaving the loop early aborts it. Several
        streams may be read in turn.
        """
        with RequestBatch(self, [prompt], [params]) as batch:
            yield from batch.outputs()
