"""Fields of other servers (vLLM, SGLang, llama.cpp, TGI, OpenAI, Anthropic), and of other
endpoints, that a body does not declare.

`docs/server.md` has the same table. Unknown fields are ignored and listed in a header.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

MAX_INT = 2**31 - 1  # more tokens than any context has
_NOTHING: tuple[object, ...] = (None, False, 0, "", [], {})
_UNSET: tuple[object, ...] = (None, "", [])  # where {} is a schema
_UNLIMITED = (None, -1)
_IS_TRUE = (None, True)


class Fate(enum.StrEnum):
    """The effect of a field whose value is not neutral."""

    OBEYED = "obeyed"
    IGNORED = "no effect"
    REFUSED = "refused"


class ForeignField(NamedTuple):
    """The effect of some fields.

    Attributes:
        names: of the fields.
        fate: of each.
        why: why they are ignored, or what to send instead of rejected ones.
        becomes: the declared field, or another name of it; with a dot, a field of an object. The
            first of several that a body declares.
        neutral: values without effect, which are dropped.
        values: value -> its value here, if different.
    """

    names: tuple[str, ...]
    fate: Fate
    why: str = ""
    becomes: str = ""
    neutral: tuple[object, ...] = _NOTHING
    values: Mapping[object, object] = MappingProxyType({})


def _obeyed(names: str, becomes: str, neutral: tuple[object, ...] = _NOTHING) -> ForeignField:
    return ForeignField(tuple(names.split()), Fate.OBEYED, "", becomes, neutral)


def _ignored(names: str, why: str) -> ForeignField:
    return ForeignField(tuple(names.split()), Fate.IGNORED, why)


def _refused(
    names: str, why: str, *defaults: object, neutral: tuple[object, ...] = _NOTHING
) -> ForeignField:
    return ForeignField(tuple(names.split()), Fate.REFUSED, why, "", (*neutral, *defaults))


_NO_ADAPTERS = "an adapter is named as the model"
_NO_SAMPLER = (
    "the sampler has temperature, top_k, top_p, min_p, epsilon_cutoff, penalties and logit_bias"
)
_NO_OUTPUT = "the answer has no such part"
_NO_STATE = "nothing is stored; send all items as input"
_NO_TRANSFER = "caches are not transferred"
_VECTORS = "vectors are float32, little-endian and of length 1"

TABLE = (
    _obeyed("guided_json json_schema", "structured_outputs.json", _UNSET),
    _obeyed("guided_regex regex", "structured_outputs.regex", _UNSET),
    _obeyed("guided_choice", "structured_outputs.choice", _UNSET),
    _obeyed("guided_grammar grammar ebnf", "structured_outputs.grammar", _UNSET),
    _obeyed("repeat_penalty", "repetition_penalty"),
    ForeignField(("n_predict",), Fate.OBEYED, "", "max_tokens", (None,), {-1: MAX_INT}),
    _obeyed("max_completion_tokens max_output_tokens", "max_tokens", (None,)),
    _obeyed("max_tokens", "max_output_tokens", (None,)),
    _obeyed("response_format", "text.format output_config.format", (None, {"type": "text"})),
    _obeyed("reasoning_effort", "reasoning.effort output_config.effort", (None,)),
    _obeyed("stop", "stop_sequences", _UNSET),
    _obeyed("stop_sequences", "stop", _UNSET),
    _obeyed("thinking_budget_tokens reasoning_budget_tokens", "thinking_token_budget", _UNLIMITED),
    ForeignField(
        ("reasoning_format",), Fate.OBEYED, "", "separate_reasoning", (None, "auto"),
        {"none": False, "deepseek": True},
    ),
    _obeyed("n_cmpl", "n"),
    _obeyed("no_stop_trim", "include_stop_str_in_output"),
    _obeyed("extra_key", "cache_salt"),
    _obeyed("activation softmax", "use_activation", (None,)),
    _obeyed("instruct", "instruction"),
    _obeyed("queries data_1", "text_1", (None,)),
    _obeyed("items data_2", "text_2", (None,)),
    _obeyed("documents", "text_2", (None, [])),
    _ignored("request_id rid session_id custom_labels", "names a request or its sender"),
    _ignored(
        "cache_prompt id_slot n_keep n_discard n_cache_reuse prediction prompt_cache_options "
        "prompt_cache_retention ngram_corpus_id routed_dp_rank disagg_prefill_dp_rank "
        "data_parallel_rank backend_sampling guided_decoding_backend stream_interval "
        "sse_ping_interval speculative.n_max speculative.n_min speculative.p_min inference_geo "
        "speed",
        "says how fast, or where, an answer is made",
    ),
    _ignored(
        "media_io_kwargs mm_processor_kwargs images_config max_dynamic_patch min_dynamic_patch "
        "use_audio_in_video return_mm_kwargs",
        "is about images, video or sound, which are refused themselves",
    ),
    _ignored(
        "length_penalty dynatemp_exponent dry_base dry_allowed_length dry_penalty_last_n "
        "dry_sequence_breakers xtc_threshold mirostat_tau mirostat_eta adaptive_decay "
        "max_tool_calls routed_experts_prompt_start routed_experts_start_len",
        "belongs to a method that is off, or is refused",
    ),
    _ignored(
        "stream_reasoning spaces_between_special_tokens",
        "chooses how the same tokens are presented",
    ),
    _ignored(
        "return_cached_tokens_details return_progress return_token_offsets timings_per_token "
        "verbose stream_options diagnostics",
        "asks for figures beside the answer",
    ),
    _ignored("verbosity", "is a hint to models that were trained for it"),
    _refused("lora lora_path adapter_id", _NO_ADAPTERS),
    _refused("typical_p", _NO_SAMPLER, 1),
    _refused("top_n_sigma adaptive_target", _NO_SAMPLER, -1),
    _refused(
        "dynatemp_range dry_multiplier xtc_probability mirostat min_keep n_indent samplers "
        "custom_logit_processor custom_params logits_processors vllm_xargs watermarking",
        _NO_SAMPLER,
    ),
    _refused("repeat_last_n", "penalties count all tokens; leave it out, or send -1", 64, -1),
    _refused("use_beam_search", "send n, or best_of"),
    _refused("repetition_detection", "send repetition_penalty"),
    _refused("logprob_token_ids n_probs post_sampling_probs", "send logprobs (and top_logprobs)"),
    _refused("stop_regex", "send stop, or structured_outputs.regex for the whole answer"),
    _refused("reasoning_budget_message", "send stop"),
    _refused("reasoning_control", "an answer that runs cannot be changed"),
    _refused("separate_reasoning include_reasoning", "is a field of chats", neutral=_IS_TRUE),
    _refused("thinking_token_budget", "is a field of chats and responses", neutral=_UNLIMITED),
    _refused("reasoning", "send reasoning_effort"),
    _refused("t_max_predict_ms t_max_prompt_ms", "send the header x-request-timeout, in seconds"),
    _refused("guided_whitespace_pattern", "JSON has at most one space between its parts"),
    _refused("structural_tag grammar_lazy grammar_triggers preserved_tokens",
             "send structured_outputs, or tools"),
    _refused("prompt_embeds embed_overrides embed_override_token_id input_ids",
             "send text, or token ids as the prompt of a completion"),
    _refused("image_data multimodal_data", "send text"),
    _refused("chat_template tool_prompt task", "the model's own template is used; "
             "chat_template_kwargs are its variables"),
    _refused("add_special_tokens", "the chat template writes them"),
    _refused("echo", "send continue_final_message, or a completion"),
    _refused("logprobs suffix", "send a completion"),
    _refused("input_prefix input_suffix input_extra", "send POST /infill"),
    _refused("messages", "send a prompt, or input"),
    _refused("input", "send messages, or a prompt"),
    _refused("prompt", "send messages, or input"),
    _refused("instructions system", "send a system message"),
    _refused("text", "send response_format", {"format": {"type": "text"}}),
    _refused("rank_fields", "documents are texts, or objects with a text"),
    _refused("max_chunks_per_doc", "send max_tokens_per_doc"),
    _refused("functions", "send tools"),
    _refused("container mcp_servers", "no tools run on this server"),
    _refused("function_call", "send tool_choice", "none", "auto"),
    _refused("web_search_options moderation", "nothing but the model is asked"),
    _refused("modalities", "answers are text", ["text"]),
    _refused("audio", "answers are text"),
    _refused("return_prompt_token_ids return_tokens", "send return_token_ids"),
    _refused("return_prompt_text", "send return_token_ids, and the ids to /detokenize"),
    _refused("return_hidden_states return_routed_experts return_meta_info response_fields "
             "enable_response_messages", _NO_OUTPUT),
    _refused("context_management conversation previous_input_messages previous_response "
             "previous_response_id session_params", _NO_STATE),
    _refused("kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room",
             _NO_TRANSFER),
    _refused("embed_dtype", _VECTORS, "float32", "float"),
    _refused("endianness", _VECTORS, "native", "little"),
    _refused("use_activation normalize", _VECTORS, neutral=_IS_TRUE),
    _refused("embd_normalize", _VECTORS, neutral=(None, 2)),
    _refused("padding", "texts are not padded", "do_not_pad"),
)  # fmt: skip

ROWS = {name: row for row in TABLE for name in row.names}


def markdown() -> str:
    """The table as `docs/server.md` shows it."""
    lines = ["| fields | what becomes of them |", "|---|---|"]
    for row in TABLE:
        names = ", ".join(f"`{name}`" for name in row.names)
        targets = " or ".join(f"`{target}`" for target in row.becomes.split())
        does = targets if row.fate is Fate.OBEYED else f"{row.fate}: {row.why}"
        lines.append(f"| {names} | {does} |")
    return "\n".join(lines) + "\n"
