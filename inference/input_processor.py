"""Prompts and sampling parameters become sequences, checked against what the engine can do."""

import dataclasses
import functools
import math
import operator
from collections.abc import Sequence as Tokens
from collections.abc import Set

import numpy as np

from configs.engine import Config
from configs.errors import InputError, shown
from inference.adapters.table import AdapterTable
from inference.kv_pages import prompt_pages
from inference.request import MAX_BIASES, SamplingParams
from inference.scheduling.sequence import (
    Adapter,
    AdapterUse,
    Budget,
    Constraint,
    History,
    Prefix,
    Sequence,
    cache_key,
    derived_seed,
)
from inference.text.grammar import Grammars
from inference.text.thinking import Thinking
from inference.text.tokenizer import Tokenizer
from sharding import hosts


class InputProcessor:
    """Makes the sequences of one engine."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | None,
        eos_ids: Set[int],
        why_no_text: str = "",
    ):
        self.adapters = AdapterTable(config)
        self._config = config
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._why_no_text = why_no_text
        self._next_id = 0
        self._seeds = np.random.default_rng(config.engine.seed)

    def encode(self, prompt: str | Tokens[int]) -> list[int]:
        """Token ids of a prompt; raises InputError if it is neither a text nor ids, or a text that
        no tokenizer is there to read.
        """
        if not isinstance(prompt, str):
            try:
                return [operator.index(token) for token in prompt]
            except TypeError:
                raise InputError("a prompt is a text or a list of token ids") from None
        if self._tokenizer is None:
            raise InputError(f"{self._why_no_text}: give token ids instead of text")
        return self._tokenizer.encode(prompt)

    def _check(self, tokens: list[int], params: SamplingParams) -> None:
        vocab, limit = self._config.model.vocab_size, self._config.max_context
        if not tokens:
            raise InputError("the prompt is empty: at least one token is needed")
        if len(tokens) == 1 and not params.max_new_tokens and params.pooling is None:
            raise InputError("a single token has no score: at least two tokens are needed")
        if params.thinking_budget is not None and params.thinking_budget > limit:
            raise InputError(
                f"thinking_budget is at most the context of {limit}, not {params.thinking_budget}"
            )
        if len(tokens) > limit - (params.max_new_tokens > 0):
            raise InputError(f"the prompt has {len(tokens)} tokens, the context holds {limit}")
        biased, allowed = (token for token, _ in params.logit_bias), params.allowed_token_ids
        listed = *params.stop_token_ids, *params.banned_token_ids, *(allowed or ()), *biased
        for token in (*tokens, *listed):
            if not 0 <= token < vocab:
                raise InputError(f"token id {shown(token)} is not in the vocabulary of {vocab}")
        banned = set(params.banned_token_ids)
        if params.min_tokens:
            banned |= {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}
        if all(token in banned for token in (range(vocab) if allowed is None else allowed)):
            raise InputError("every token is banned: allow one (min_tokens bans all end tokens)")
        if len(params.logit_bias) > MAX_BIASES:
            raise InputError(f"at most {MAX_BIASES} logit biases, not {len(params.logit_bias)}")
        features = self._config.engine.requests
        if params.needs_counts and not features.penalties:
            raise InputError("penalties need an engine built with engine.requests.penalties=true")
        if params.pooling is not None and not features.embeddings:
            raise InputError("pooling needs an engine built with engine.requests.embeddings=true")
        if params.prompt_budget is not None and not features.prompt_budgets:
            raise InputError(
                "prompt_budget needs an engine built with engine.requests.prompt_budgets=true"
            )
        if params.stop and self._tokenizer is None:
            raise InputError("stop strings need a tokenizer: use stop_token_ids")
        if params.vote and self._tokenizer is None:
            raise InputError("vote compares texts, which need a tokenizer")
        limit = self._config.engine.max_seqs
        for name in ("n", "best_of", "beam_width"):
            value = getattr(params, name) or 0
            if value > limit:
                raise InputError(f"{name} is at most engine.max_seqs={limit}, not {shown(value)}")

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self._text_tokenizer, self._eos_ids)

    @property
    def _text_tokenizer(self) -> Tokenizer:
        """The tokenizer, for what limits texts."""
        if not self._config.engine.requests.grammars:
            raise InputError(
                "a grammar or a thinking_budget needs an engine built with "
                "engine.requests.grammars=true"
            )
        if self._tokenizer is None:
            raise InputError("a grammar or a thinking_budget needs a tokenizer")
        return self._tokenizer

    def prepare(self, params: SamplingParams) -> None:
        """Compiles the grammar of a request, in any thread; raises an `InputError` if it cannot."""
        if params.grammar is not None:
            self._grammars.start(params.grammar)

    def _check_closing(self, closing: Tokens[int], params: SamplingParams) -> None:
        """Raises InputError if the tokens that close a thought may not come."""
        allowed = closing if params.allowed_token_ids is None else params.allowed_token_ids
        banned = [*params.banned_token_ids, *(params.stop_token_ids if params.min_tokens else ())]
        if not {*closing}.isdisjoint(banned) or not {*closing} <= {*allowed}:
            raise InputError(
                f"thinking_budget closes a thought with the tokens {[*closing]}: allow these"
            )

    def _check_seed(self, params: SamplingParams) -> None:
        """What a request asks for; its answers have seeds of their own."""
        acceptance = self._config.engine.drafts.acceptance
        if params.seed is not None and acceptance != "coupled":
            raise InputError(
                f"a seed asks for plain decoding's tokens: leave it or acceptance={acceptance} out"
            )

    def _check_beams(self, sequence: Sequence) -> None:
        """A beam needs as many candidates as there are beams, and those that end it: all beams may
        continue from the same one.
        """
        width = sequence.params.beam_width
        need = width + len(sequence.end_ids)
        num_tops = self._config.engine.requests.top_logprobs
        if width and num_tops < need:
            raise InputError(
                f"beam_width={width} with {len(sequence.end_ids)} end tokens needs an engine built "
                f"with engine.requests.top_logprobs of at least {need}, not {num_tops}"
            )

    def sequences(
        self, tokens: list[int], params: SamplingParams, output: Tokens[int] = ()
    ) -> list[Sequence]:
        """A new request's sequences: one a sample, the first of which computes the prompt for all;
        or the one that a beam search begins with, whose further beams take the ids that follow its
        own. `output` is the beginning of the one answer, generated before; its log-probabilities
        are not known.

        Raises:
            InputError: the engine cannot serve it: the message says why.
        """
        self._check_seed(params)
        if output and (params.num_running > 1 or len(output) >= params.max_new_tokens):
            raise InputError(
                f"{len(output)} tokens of an output go with n=1 and more max_new_tokens, not "
                f"{params.max_new_tokens}"
            )
        adapter = None if params.adapter is None else self.adapters.find(params.adapter)
        if adapter is not None and params.prompt_budget is not None:
            raise InputError("prompt_budget is measured by the model alone: leave adapter out")
        first = self._sequence([*tokens, *output], len(tokens), params, adapter)
        first.results.logprobs = [math.nan] * len(output)
        if self._config.engine.requests.top_logprobs:
            first.results.top_logprobs = [((), ())] * len(output)
        self._check_beams(first)
        sequences, num_siblings = [first], params.num_samples - 1
        if params.beam_width:
            first.needs_commit = True
            self._next_id += params.beam_width - 1
            return sequences
        for index in range(1, 1 + num_siblings):
            sibling_params = dataclasses.replace(params, seed=derived_seed(first.seed, index))
            sequences.append(self._sequence(list(tokens), len(tokens), sibling_params, adapter))
        first.lead(sequences[1:])
        return sequences

    def continuation(self, parent: Sequence, params: SamplingParams) -> Sequence:
        """A sequence that continues another's tokens in its own way; raises as `sequences`."""
        self._check_seed(params)
        if any(request.prompt_budget is not None for request in (parent.params, params)):
            raise InputError(
                "a fork and what it is forked from keep their prompt: leave prompt_budget out"
            )
        for name in ("cache_salt", "adapter"):
            if getattr(params, name) != getattr(parent.params, name):
                raise InputError(f"a fork has the {name} of what it is forked from")
        adapter = parent.adapter.weights  # which may have been unloaded
        child = self._sequence(list(parent.tokens), parent.num_prompt_tokens, params, adapter)
        child.results.logprobs = list(parent.results.logprobs)
        child.results.top_logprobs = list(parent.results.top_logprobs)
        child.history.params_versions = parent.history.params_versions
        child.history.version_starts = parent.history.version_starts
        return child

    def _sequence(
        self,
        tokens: list[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        adapter: Adapter | None,
    ) -> Sequence:
        self._check(tokens, params)
        self._next_id += 1
        seed = params.seed
        if seed is None:
            seed = hosts.current().broadcast(int(self._seeds.integers(2**63)))
        eos_ids = frozenset(() if params.ignore_eos else self._eos_ids)
        constraint = self._constraint(tokens, num_prompt_tokens, params)
        drafts, cache = self._config.engine.drafts, self._config.engine.cache
        proposes = drafts.proposer is not None
        num_excess_tokens = prompt_pages.num_excess_tokens(
            num_prompt_tokens, params.prompt_budget, self._config.page_tokens
        )
        return Sequence(
            self._next_id, params, tokens, num_prompt_tokens, eos_ids, seed,
            speculates=proposes and params.speculate and params.grammar is None
            and not params.beam_width,
            needs_commit=drafts.num_drafts > 0 and not proposes,
            constraint=constraint, history=History(hosts.current().now()),
            prefix=Prefix(cache_key(cache, self._next_id, params.cache_salt, adapter)),
            budget=Budget(num_excess_tokens), adapter=AdapterUse(adapter),
        )  # fmt: skip

    def _constraint(
        self, tokens: list[int], num_prompt_tokens: int, params: SamplingParams
    ) -> Constraint | None:
        """What limits a sequence's output, the beginning of which has been generated before."""
        if not params.max_new_tokens or not params.is_constrained:
            return None
        output, grammar = tokens[num_prompt_tokens:], None
        if params.grammar is not None:
            grammar = self._grammars.start(params.grammar, () if params.thinks else output)
        if not params.thinks:
            return grammar
        thinking = Thinking(
            self._text_tokenizer, tokens[:num_prompt_tokens], params.thinking_budget, grammar,
            () if grammar is None else {*self._eos_ids, *params.stop_token_ids},
        )  # fmt: skip
        if params.thinking_budget is not None:
            self._check_closing(thinking.closing, params)
        thinking.start_over(output)
        return thinking
