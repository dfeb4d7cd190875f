"""What is learned of a conversation: what an engine would have to produce, and nothing else."""

import itertools
import json

import pytest

from configs.errors import InputError
from inference.text.end_tokens import EndTokens
from inference.training import answer_lines
from inference.training.answers import Encoder
from inference.training.start import Vocabulary
from tests.inference.server.parrot import TEMPLATES
from tests.inference.text import harmony
from tests.inference.text.test_end_tokens import tokenizer

CHAT = [
    {"role": "user", "content": "Is it <s> so?"},
    {"role": "assistant", "content": "Yes: </b>\n\n1. </s>"},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "No"},
]
# The thought of the last answer alone is written, as Qwen3 and DeepSeek R1 have it.
FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HARMONY, ENDS = harmony.tokenizer(), (harmony.RETURN, harmony.CALL)
THINKS = FORGETS.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")


def encoder(template):
    return Encoder(Vocabulary(tokenizer(template), {}, ()))


def runs(sequence):
    """Where answers begin and end."""
    groups = itertools.groupby(range(len(sequence.tokens)), lambda n: sequence.is_answer[n])
    return [(places[0], places[-1] + 1) for is_answer, (*places,) in groups if is_answer]


def check_as_an_engine_would(template, messages, expected_sequences):
    """Behind the prompt that it would be given for each answer, up to the first end token."""
    words = tokenizer(template)
    ends = EndTokens(words, ())
    sequences = encoder(template).conversation(messages, None)
    assert len(sequences) == expected_sequences
    spans = [(sequence, span) for sequence in sequences for span in runs(sequence)]
    places = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(spans) == len(places)
    for (sequence, (start, stop)), place in zip(spans, places, strict=True):
        assert sequence.tokens[:start] == words.apply_chat_template(messages[:place])
        assert [token in ends for token in sequence.tokens[start:stop]] == [False] * (
            stop - start - 1
        ) + [True]
        text = words.decode(sequence.tokens[start : stop - 1], skip_special=False)
        assert text.strip().endswith(messages[place]["content"].strip())


@pytest.mark.parametrize("family, count", [
    ("smollm2", 1), ("llama2", 1), ("llama3", 1), ("gemma", 1), ("mistral", 1), ("qwen", 1),
    ("phi3", 1), ("harmony", 2),
])  # fmt: skip
def test_answers_are_those_of_engines(family, count):
    """Harmony ends the last answer in another way than those before."""
    check_as_an_engine_would(TEMPLATES[family], CHAT, count)


def test_answers_that_are_written_otherwise_later_are_sequences_of_their_own():
    thoughtful = [
        {**message, "reasoning_content": "Hm"} if message["role"] == "assistant" else message
        for message in CHAT
    ]
    check_as_an_engine_would(FORGETS, thoughtful, 2)
    check_as_an_engine_would(FORGETS, CHAT, 1)


@pytest.mark.parametrize("content, count", [("Look", 1), ("", 2)])
def test_calls_and_results_of_tools(content, count):
    """A call is an answer, its result is none. A call alone begins with a line's end, which is one
    token with that of its prompt only where both are history.
    """
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [
        CHAT[0], {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "result"}, CHAT[3],
    ]  # fmt: skip
    sequences = encoder(TEMPLATES["qwen"]).conversation(messages, tools)
    assert len(sequences) == count
    decode = tokenizer(None).decode
    called, answered = (
        decode(sequence.tokens[start:stop], skip_special=False)
        for sequence in sequences
        for start, stop in runs(sequence)
    )
    form = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
    assert called == f"{content}\n{form}" and answered == "No<|im_end|>"
    assert all("<tools>" in decode(sequence.tokens) for sequence in sequences)


def test_a_message_of_no_weight_is_read_alone():
    (whole,) = encoder(FORGETS).conversation(CHAT, None)
    (part,) = encoder(FORGETS).conversation([CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]], None)
    assert part.tokens == whole.tokens and runs(part) == runs(whole)[1:]


def called(*names, **more):
    calls = [{"id": n, "function": {"name": n, "arguments": {}}} for n in names]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def answer_texts(words, sequence):
    return [words.decode(sequence.tokens[start:stop], skip_special=False)
            for start, stop in runs(sequence)]  # fmt: skip


@pytest.mark.parametrize("words", [tokenizer(TEMPLATES["qwen"]), HARMONY], ids=["qwen", "harmony"])
def test_calls_of_no_weight_are_read_alone(words):
    """Harmony's template, where each call is a message, gets them one by one."""
    results = [{"role": "tool", "content": "r", "tool_call_id": name} for name in "fg"]
    messages = [CHAT[0], called("f", "g"), *results, CHAT[3]]

    def learned(messages):
        sequences = Encoder(Vocabulary(words, {}, ENDS)).conversation(messages, None)
        return [text for sequence in sequences for text in answer_texts(words, sequence)]

    *calls, last = learned(messages)
    assert len(calls) == (2 if words is HARMONY else 1) and "No" in last
    messages[1]["weight"] = 0
    assert learned(messages) == [last]


def test_a_completion_ends_with_the_tokenizers_end():
    sequence = encoder(None).completion("A: ", "b")
    words = tokenizer(None)
    assert sequence.tokens == [*words.encode("A: b"), words.eos_id]
    assert sequence.is_answer == [False] * 3 + [True] * 2


def lines(tmp_path, *fields, template=FORGETS, window=64, read=answer_lines.of_answers):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in fields))
    return read(str(path), encoder(template), window)


def test_what_is_longer_than_a_window_is_cut_and_counted(tmp_path):
    long = {"prompt": "A", "completion": "b" * 30}
    found = lines(tmp_path, {"messages": CHAT[:2]}, long, window=20)
    assert found.num_cut == 2 and len(found.sequences) == 2
    for (sequence,) in found.sequences:
        assert len(sequence.tokens) == len(sequence.is_answer) == 21
    assert lines(tmp_path, {"messages": CHAT}, long).num_cut == 0


(CALL,) = called("f")["tool_calls"]
ASKS, USER = {"role": "user", "content": "a"}, {"messages": [CHAT[0]]}


@pytest.mark.parametrize("line, message", [
    (USER, "line 2: no message of the role assistant, which is what is learned"),
    ({"messages": []}, 'line 2: not "messages": '),
    ({"messages": [{"content": "a"}]}, "line 2: a message is .*, not {'content': 'a'}"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "line 2: a message has the role 'bot'"),
    ({"messages": [ASKS | {"content": 1}]}, "line 2: the content of a message of the role user is"),
    ({"messages": [CHAT[1]]}, "line 2: the first message is an answer, before which"),
    ({"messages": [CHAT[0], CHAT[1] | {"tool_calls": [1]}]}, "line 2: 'tool_calls' is a list of"),
    ({"messages": [ASKS, called() | {"tool_calls": 5}]}, "line 2: 'tool_calls' is a list of"),
    ({"messages": [ASKS, called() | {"tool_calls": [CALL | {"id": ["x"]}]}, CHAT[3]]},
     r"line 2: 'id' of a message or a call is a text, not \['x'\]"),
    ({"messages": [ASKS, {"role": "tool", "content": "r", "tool_call_id": ["x"]}, CHAT[3]]},
     r"line 2: 'tool_call_id' of a message or a call is a text, not \['x'\]"),
    *(({"messages": [ASKS, CHAT[1] | {name: {"x": 1}}]}, f"line 2: '{name}' of a message or a call")
      for name in ("name", "reasoning_content", "thinking", "reasoning")),
    ({"messages": [ASKS, CHAT[1] | {"weight": 2}]}, "line 2: the weight of a message is 0"),
    ({"messages": [ASKS, CHAT[1] | {"weight": 0}]}, "line 2: no message of the role assistant"),
    ({"messages": [ASKS | {"content": "\ud800"}, CHAT[3]]}, "line 2: .*Unicode"),
    ({"messages": CHAT, "tools": [1]}, "line 2: 'tools' is a list of"),
    ({"messages": CHAT, "prompt": "a"}, "line 2: 'prompt' does not go with 'messages'"),
    ({"messages": CHAT, "extra": "a"}, "line 2: 'extra' is not one of messages, completion"),
    ({"prompt": "a"}, "line 2 is not one of "),
    ({"completion": "a"}, "line 2: 'prompt' is a text of at least one character, not None"),
    ({"prompt": "a", "completion": ""}, "line 2: 'completion' is a text of at least one character"),
    ({"messages": [ASKS | {"content": "a" * 70}, CHAT[3]]},
     r"line 2: an answer begins at token \d\d, behind training.window=64: leave the line out"),
    ({"prompt": "a" * (4 << 20), "completion": "b"}, "line 2 has more than 4194304 characters"),
])  # fmt: skip
def test_a_bad_line_is_one_line(tmp_path, line, message):
    with pytest.raises(InputError, match=message) as caught:
        lines(tmp_path, {"messages": CHAT}, line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template, message", [
    (None, "line 1: this checkpoint has no chat template"),
    (THINKS, "line 1: the chat template does not write the answer behind the prompt"),
    (FORGETS.replace("<|end|>", "\n"), "line 1: the chat template ends the answer with none of"),
])  # fmt: skip
def test_templates_that_do_not_teach(tmp_path, template, message):
    with pytest.raises(InputError, match=message):
        lines(tmp_path, {"messages": CHAT[2:]}, template=template)


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def test_preferences_are_two_answers_to_one_prompt(tmp_path):
    called = {"role": "assistant", "content": "c"}
    found = lines(
        tmp_path, PAIR, {"messages": CHAT[:1], "chosen": "b", "rejected": called},
        read=answer_lines.of_preferences,
    )  # fmt: skip
    decode = tokenizer(None).decode
    for pair in found.sequences:
        texts = []
        for sequence in pair:
            ((start, stop),) = runs(sequence)
            assert sequence.tokens[:start] == pair[0].tokens[:start]
            texts.append(decode(sequence.tokens[start:stop]))
        assert texts == ["b", "c"]


def test_several_calls_are_one_answer_or_rejected():
    messages = [CHAT[0], called("f", "g")]
    words = tokenizer(TEMPLATES["qwen"])
    whole = encoder(TEMPLATES["qwen"]).last_answer(messages, None)
    (text,) = answer_texts(words, whole)
    assert '"f"' in text and '"g"' in text
    by_channels = Encoder(Vocabulary(HARMONY, {}, ENDS))
    with pytest.raises(InputError, match="the answer has 2 calls, and the chat template writes"):
        by_channels.last_answer(messages, None)
    (text,) = answer_texts(HARMONY, by_channels.last_answer([CHAT[0], called("f")], None))
    assert "functions.f" in text


@pytest.mark.parametrize("line, message", [
    (PAIR | {"rejected": "b"}, "line 1: the answer that is chosen and the one that is"),
    ({"prompt": "a", "chosen": "b"}, "line 1: 'rejected' is a text of at least one character"),
    (PAIR | {"prompt": 3}, "line 1: 'prompt' is a text of at least one character, not 3"),
    (PAIR | {"prompt": "a" * 70}, "line 1: an answer begins at token 70, behind training.window"),
    ({"messages": CHAT[:1], "chosen": {"role": "user", "content": "b"}, "rejected": "c"},
     "line 1: 'chosen' is a message of the role assistant, not user"),
])  # fmt: skip
def test_a_bad_preference_is_one_line(tmp_path, line, message):
    with pytest.raises(InputError, match=message) as caught:
        lines(tmp_path, line, read=answer_lines.of_preferences)
    assert "\n" not in str(caught.value)
