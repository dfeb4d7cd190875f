"""An engine whose answers are known beforehand: a token a byte, a fixed text, and some tokens that
make trouble. What serves it cannot tell it from a real one.
"""

import dataclasses
import functools
import threading
import time

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models

from configs.errors import InputError
from inference.classifier import Classifier
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.scheduling.sequence import derived_seed
from inference.server.frames import ITERATION_TOKENS, Heartbeat, Loaded, TextFacts
from inference.text.detokenizer import Detokenizer
from inference.text.grammar import Grammars
from inference.text.tokenizer import Tokenizer, byte_alphabet

START, END, REFUSED, CRASHES, HANGS, VOCAB = 256, 257, 258, 259, 260, 270
GAP_MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")  # from 261 on
MAX_CONTEXT, MAX_SEQS, NUM_TOP, WIDTH = 512, 4, 20, 8
COUNTED = (
    "decode_steps", "decode_step_seconds", "predicted_decode_step_seconds", "decode_step_bytes",
    "prefill_steps", "prefill_step_seconds", "step_tokens", "host_seconds",
)  # fmt: skip
CACHE = {"block_size": "16", "num_gpu_blocks": "99", "cache_dtype": "bfloat16",
         "enable_prefix_caching": "True"}  # fmt: skip
CLOSINGS = '\n</parameter>\n</arg_value><|"|><escape></｜DSML｜parameter>'
REPLY = "Grüße, 世界! 🙂 The answer is 42. "
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    alphabet = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    names = ("<|start|>", "<|end|>", "<|refused|>", "<|crashes|>", "<|hangs|>", *GAP_MARKS,
             "[TOOL_CALLS]", "[ARGS]")  # fmt: skip
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return Tokenizer(backend, VOCAB, {"eos_token": "<|end|>"}, TEMPLATE)


def reply(n: int, seed: int | None = None) -> list[int]:
    """The first tokens of an answer: greedy requests get the text from its beginning."""
    start = "" if seed is None else f"{seed % 1000}: "
    return list((start + REPLY * (1 + n // len(REPLY))).encode()[:n])


def walk(state) -> list[int]:
    """The shortest text that a grammar permits, or nearly so."""
    tokens: list[int] = []
    closing, num_closing = CLOSINGS.encode(), 0  # of any text
    while END not in tokens:
        words = state.mask()
        permitted = [v for v in range(VOCAB) if words[v // 32] >> (v % 32) & 1]
        first = [token for token in (END, *b'"}],:{') if token in permitted]
        byte = closing[num_closing % len(closing)]
        goes_on = 0x80 <= byte < 0xC0 and tokens[-1] == closing[(num_closing - 1) % len(closing)]
        if END not in permitted and ({0, *b"\n</>"} <= set(permitted) or goes_on):
            first, num_closing = [byte], num_closing + 1
        tokens.append((first or permitted)[0])
        state.accept(tokens[-1])
    return tokens


@dataclasses.dataclass
class _Sequence:
    id: int
    index: int
    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    detokenizer: Detokenizer
    num_told: int = 0
    version_starts: tuple[tuple[int, int], ...] = ()


class FakeEngine:
    """As `Served`."""

    def __init__(
        self, step_s: float = 0.0, has_text: bool = True, classifier: Classifier | None = None
    ):
        self.step_s = step_s
        self.running: list[_Sequence] = []
        self.aborted: list[int] = []
        self.num_steps = 0
        self.slack = 0.0  # that it says it has
        self.is_compiling = False
        self.params: list[SamplingParams] = []  # of all requests
        self.prompts: list[list[int]] = []
        self.retained: list[tuple[list[int], str | None]] = []
        self.may_go_on = threading.Event()  # of a step that hangs
        self.gate = threading.Event()  # closed: no step begins, and no warm-up ends
        self.gate.set()
        self.weight_version = 0
        self.sleeps: bool | None = None  # None: it is awake; else whether it kept its weights
        self.read: list[str | None] = []  # paths
        self.may_read = threading.Event()
        self.may_read.set()
        self._has_text = has_text
        self._classifier = classifier
        self._grammars = Grammars(tokenizer(), [END])
        self._next_id = 100  # nobody else's ids

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def slack_s(self) -> float:
        return self.slack

    def facts(self) -> Loaded:
        text = TextFacts.of(tokenizer()) if self._has_text else None
        sizes = MAX_CONTEXT, MAX_SEQS, NUM_TOP
        facts = "fake", "fake-1", *sizes, True, self._has_text, VOCAB, text
        return Loaded(
            *facts, pooling="last", embedding_width=WIDTH, cache=CACHE, classifier=self._classifier
        )

    def warm_up(self) -> None:
        self.gate.wait(60)

    def prepare(self, params: SamplingParams) -> None:
        self._grammars.start(params.grammar)

    def read_weights(self, path: str | None) -> str | None:
        self.may_read.wait(60)
        self.read.append(path)
        if path == "broken":
            raise OSError(5, "Input/output error", path)
        if path is not None and not path.startswith("step"):
            raise InputError(f"{path!r} is another model than fake")
        return path

    def update_weights(self, new, version: int | None, keeps_pages: bool) -> None:
        assert self.sleeps is None and new in self.read
        if version is not None and version <= self.weight_version:
            raise InputError(f"weight_version={version}: must be above {self.weight_version}")
        self.weight_version = version or self.weight_version + 1

    def read_adapter(self, path: str):
        raise InputError("an adapter needs an engine with engine.adapters.slots above 0")

    def add_adapter(self, name: str, adapter) -> None:
        raise AssertionError("none is read")

    def unload_adapter(self, name: str) -> None:
        raise InputError(f"there is no adapter {name!r}")

    def sleep(self, keeps_weights: bool) -> None:
        assert self.sleeps is None
        self.sleeps = keeps_weights

    def wake(self, new, version: int | None) -> None:
        is_kept, self.sleeps = self.sleeps, None
        assert is_kept or new in self.read
        if not is_kept or new is not None:
            self.update_weights(new, version, False)

    def add(self, tokens, params: SamplingParams, output=()) -> int:
        assert self.sleeps is None
        if REFUSED in tokens:
            raise InputError("every token is banned: allow one")
        self._next_id += 100
        self.params.append(params)
        self.prompts.append(list(tokens))
        for index in range(params.n):
            seed = derived_seed(params.seed, index) if params.temperature else None
            planned, told = self.plan(params, seed), list(output)
            if params.grammar is not None:
                planned = walk(self._grammars.start(params.grammar))
                if params.thinks and tokenizer().decode(tokens).rstrip().endswith("<think>"):
                    planned = [*b"</think>", *planned]
            assert planned[: len(told)] == told
            how = params.skip_special_tokens, params.shown_special_ids
            own = Detokenizer(tokenizer(), params.stop, params.min_tokens, *how)
            own.push(told)
            sequence = _Sequence(
                self._next_id, index, list(tokens), params, planned, own, len(told)
            )
            self.running.append(sequence)
        return self._next_id

    def plan(self, params: SamplingParams, seed: int | None) -> list[int]:
        """The tokens of an answer without a grammar."""
        return reply(params.max_new_tokens, seed)

    def abort(self, id: int) -> None:
        self.aborted += [id] * any(each.id == id for each in self.running)
        self.running = [each for each in self.running if each.id != id]

    def retain(self, tokens, cache_salt, adapter) -> None:
        self.retained.append((tokens, cache_salt))

    def step(self) -> list[RequestOutput]:
        assert self.sleeps is None
        self.gate.wait(60)
        self.num_steps += 1
        time.sleep(self.step_s)
        if any(CRASHES in each.prompt for each in self.running):
            raise RuntimeError("a step failed at 0x7f00 in /some/path")
        if any(HANGS in each.prompt for each in self.running):
            self.may_go_on.wait(60)
        outputs = [self._advance(each) for each in self.running[:MAX_SEQS]]
        ended = {(each.id, each.index) for each in outputs if each.finish_reason}
        self.running = [each for each in self.running if (each.id, each.index) not in ended]
        return outputs

    def heartbeat(self) -> Heartbeat:
        running, waiting = self.running[:MAX_SEQS], self.running[MAX_SEQS:]
        counters = dict.fromkeys(COUNTED, self.num_steps / 10) | {"steps": self.num_steps}
        return Heartbeat(
            len(running), len(waiting), 0.25, counters, len(waiting) // 2, 0.5, 0.1, 0.2, 3e10,
            [self.num_steps] + [0] * len(ITERATION_TOKENS), [2 * self.num_steps, self.num_steps],
        )  # fmt: skip

    def _advance(self, each: _Sequence) -> RequestOutput:
        if each.params.pooling is not None:
            data = vector(each.prompt).astype("<f4").tobytes()
            return RequestOutput(each.id, [], "", "length", embedding=data)
        if not each.params.max_new_tokens:
            values = [-0.5 * (1 + n % 3) for n in range(len(each.prompt) - 1)]
            tops = [top(id, value) for id, value in zip(each.prompt[1:], values, strict=True)]
            return RequestOutput(each.id, [], "", "length", 0, (0,), values, tops)
        token = each.tokens[each.num_told]
        starts = each.version_starts
        if not starts or starts[-1][1] != self.weight_version:
            each.version_starts = (*starts, (each.num_told, self.weight_version))
        each.num_told += 1
        text, reason, stopped = each.detokenizer.push([token]), None, None
        if each.detokenizer.stopped is not None:
            reason, stopped = "stop", each.detokenizer.stopped
        elif token == END:
            reason = "stop"
        elif token in each.params.stop_token_ids:
            reason, stopped = "stop", token
        elif each.num_told == each.params.max_new_tokens:
            reason = "length"
            text += each.detokenizer.flush()
        return RequestOutput(
            each.id, [token], text, reason, each.index, (0,), [-0.25], [top(token, -0.25)], stopped,
            version_starts=each.version_starts,
        )  # fmt: skip


def vector(tokens: list[int]) -> np.ndarray:
    """What stands for the hidden state of a prompt."""
    return np.random.default_rng(tokens).normal(size=WIDTH).astype(np.float32)


def head(*labels: str, **fields) -> Classifier:
    """A head over what `vector` gives."""
    weight = np.random.default_rng(7).normal(size=(len(labels), WIDTH)).astype("<f4").tobytes()
    return Classifier(weight, bytes(4 * len(labels)), labels, **fields)


HEAD = head("relevance", activation="sigmoid")


def top(token: int, logprob: float) -> tuple[list[int], list[float]]:
    """The token itself, and others that are less likely."""
    others = [(token + n) % 256 for n in range(1, NUM_TOP)]
    return [token, *others], [logprob, *(logprob - n for n in range(1, NUM_TOP))]
