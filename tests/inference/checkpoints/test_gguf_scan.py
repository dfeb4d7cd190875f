"""The scan refuses what the format's own reader crashes or hangs on: one line, at once."""

import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.errors import InputError
from configs.kinds.rope import Llama3, Rope
from inference.checkpoints import resolve
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from layers import rope

U32, U64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
F32, Q8_0, I32 = 0, 8, 26


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return U64(len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + U32(kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + U32(len(dims)) + b"".join(map(U64, dims)) + U32(kind) + U64(offset)


def gguf_bytes(
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    data: bytes = b"",
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    header = b"GGUF" + U32(version) + U64(len(tensors)) + U64(len(entries))
    header += b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % alignment) + data


def refusal(path: Path, data: bytes) -> str:
    """The message with which a file is refused: one line, within a second of computing."""
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        gguf_file.open_gguf(path)
    assert time.process_time() - start < 1
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


MALFORMED = {
    "magic": (b"GGML" + b"\0" * 64, "it starts with"),
    "old version": (gguf_bytes(version=1), "version 1 "),
    "new version": (gguf_bytes(version=99), "version 99 "),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + b"\0" * 16, "big-endian"),
    "tensor count": (b"GGUF" + U32(3) + U64(1 << 62) + U64(0), "at most 65536"),
    "entry count": (b"GGUF" + U32(3) + U64(0) + U64(1 << 62), "at most 65536"),
    "key length": (gguf_bytes((U64(1 << 62),)), "bytes, 0 are left"),
    "string length": (gguf_bytes((entry("k", STRING, U64(1 << 62)),)), "'k' needs"),
    "array length": (gguf_bytes((entry("k", ARRAY, U32(UINT32) + U64(1 << 62)),)), "'k' needs"),
    "long array": (gguf_bytes((entry("k", ARRAY, U32(UINT32) + U64(10**8)),)), "'k' needs"),
    "string array length": (
        gguf_bytes((entry("k", ARRAY, U32(STRING) + U64(1 << 62)),)),
        "at most 1048576",
    ),
    "string in array": (
        gguf_bytes((entry("k", ARRAY, U32(STRING) + U64(1) + U64(1 << 62)),)),
        "'k' needs",
    ),
    "strings past the end": (
        gguf_bytes((entry("k", ARRAY, U32(STRING) + U64(9) + text("a")),)),
        "past the end",
    ),
    "nested arrays": (
        gguf_bytes((entry("k", ARRAY, U32(ARRAY) + U64(1) + U32(ARRAY) + U64(1)),)),
        "array of arrays",
    ),
    "value type": (gguf_bytes((entry("k", 13, b""),)), "unknown value type 13"),
    "element type": (gguf_bytes((entry("k", ARRAY, U32(77) + U64(1)),)), "unknown element type 77"),
    "key not UTF-8": (gguf_bytes((text(b"\xff") + U32(UINT32) + U32(1),)), "not UTF-8"),
    "duplicate key": (gguf_bytes((entry("k", UINT32, U32(1)),) * 2), "duplicate metadata key 'k'"),
    "duplicate tensor": (gguf_bytes((), (tensor("t", (8,)),) * 2, b"\0" * 32), "duplicate tensor"),
    "rank 0": (gguf_bytes((), (tensor("t", ()),)), "0 dimensions"),
    "rank 5": (gguf_bytes((), (tensor("t", (1,) * 5),)), "5 dimensions"),
    "rank 2^31": (gguf_bytes((), (text("t") + U32(1 << 31),)), "dimensions"),
    "empty dimension": (gguf_bytes((), (tensor("t", (0, 4)),)), "impossible shape"),
    "overflowing shape": (gguf_bytes((), (tensor("t", (1 << 32, 1 << 32)),)), "impossible shape"),
    "ggml type": (gguf_bytes((), (tensor("t", (8,), kind=1000),)), "unknown ggml type 1000"),
    "row of half a block": (gguf_bytes((), (tensor("t", (33,), kind=Q8_0),)), "multiple of"),
    "unaligned": (gguf_bytes((), (tensor("t", (8,), offset=4),), b"\0" * 64), "not aligned"),
    "past the end": (gguf_bytes((), (tensor("t", (8,), offset=64),), b"\0" * 64), "past the end"),
    "huge offset": (gguf_bytes((), (tensor("t", (8,), offset=1 << 63),)), "past the end"),
    "overlap": (
        gguf_bytes((), (tensor("a", (16,)), tensor("b", (8,), offset=32)), b"\0" * 64),
        "'b' overlaps tensor 'a'",
    ),
    **{
        f"alignment {value}": (
            gguf_bytes((entry("general.alignment", UINT32, U32(value)),)),
            "not a power of two",
        )
        for value in (0, 3, 1 << 31)
    },
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_by_name(case, tmp_path):
    data, expected = MALFORMED[case]
    assert expected in refusal(tmp_path / "bad.gguf", data)


def test_what_is_no_regular_file_is_refused(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path, Path("/dev/zero")):
        with pytest.raises(InputError, match=str(path)):
            gguf_file.open_gguf(path)
    assert "empty" in refusal(tmp_path / "empty.gguf", b"")


def write_sound(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("count", 7)
    writer.add_array("words", ["a", "", "ünï"])
    writer.add_array("scores", [1.5, -2.0])
    writer.add_tensor("norm", np.arange(8, dtype=np.float32))
    writer.add_tensor("matrix", np.arange(48, dtype=np.float32).reshape(6, 8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_reads_what_the_library_writes(tmp_path):
    write_sound(tmp_path / "sound.gguf")
    header = gguf_file.open_gguf(tmp_path / "sound.gguf")
    assert header.metadata["count"] == 7
    assert header.strings("words") == ["a", "", "ünï"]
    assert header.metadata["scores"].tolist() == [1.5, -2.0]
    assert {name: t.shape for name, t in header.tensors.items()} == {"norm": (8,), "matrix": (6, 8)}
    with pytest.raises(InputError, match="not a list of strings"):
        header.strings("count")


@pytest.mark.parametrize("tenth", range(10))
def test_truncated_file_is_refused(tenth, tmp_path):
    write_sound(tmp_path / "sound.gguf")
    data = (tmp_path / "sound.gguf").read_bytes()
    refusal(tmp_path / "cut.gguf", data[: len(data) * tenth // 10])


def test_many_strings_need_no_memory_of_their_number(tmp_path):
    count = 1 << 20
    lists = entry("k", ARRAY, U32(STRING) + U64(count) + bytes(8 * count))
    data = gguf_bytes((lists, entry("k", UINT32, U32(1))))
    refusal(tmp_path / "many.gguf", data)
    tracemalloc.start()
    with pytest.raises(InputError):
        gguf_file.open_gguf(tmp_path / "many.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_header_is_read_or_refused_but_never_crashes(tmp_path, data):
    path = tmp_path / "fuzzed.gguf"
    write_sound(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        content[position] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        gguf_file.open_gguf(path)
    except InputError as error:
        assert "\n" not in str(error)


# --- whole files: what the scan lets through, model and tokenizer still refuse --------------------


def number(value: int) -> tuple[int, bytes]:
    return UINT32, U32(value)


def words(*values: str | bytes) -> tuple[int, bytes]:
    return ARRAY, U32(STRING) + U64(len(values)) + b"".join(map(text, values))


def numbers(*values: int) -> tuple[int, bytes]:
    return ARRAY, U32(UINT32) + U64(len(values)) + b"".join(map(U32, values))


def floats(*values: float) -> tuple[int, bytes]:
    data = struct.pack(f"<{len(values)}f", *values)
    return ARRAY, U32(FLOAT32) + U64(len(values)) + data


TOKENS = ("<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581", "aab")
VALUES = {
    "general.architecture": (STRING, text("llama")),
    "general.name": (STRING, text("tiny")),
    "split.count": number(1),
    "llama.block_count": number(1),
    "llama.context_length": number(64),
    "llama.embedding_length": number(32),
    "llama.feed_forward_length": number(64),
    "llama.attention.head_count": number(4),
    "llama.attention.head_count_kv": number(2),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, struct.pack("<f", 1e-5)),
    "llama.rope.freq_base": (FLOAT32, struct.pack("<f", 500.0)),
    "llama.rope.scaling.original_context_length": number(32),
    "tokenizer.ggml.model": (STRING, text("llama")),
    "tokenizer.ggml.pre": (STRING, text("default")),
    "tokenizer.ggml.tokens": words(*TOKENS),
    "tokenizer.ggml.scores": floats(*range(0, -8, -1)),
    "tokenizer.ggml.token_type": numbers(2, 3, 3, 1, 1, 1, 1, 1),
    "tokenizer.ggml.merges": words("a b", "a ab"),
    "tokenizer.ggml.bos_token_id": number(1),
    "tokenizer.ggml.eos_token_id": number(2),
    "tokenizer.ggml.eot_token_id": number(2),
    "tokenizer.ggml.unknown_token_id": number(0),
    "tokenizer.ggml.add_bos_token": (BOOL, b"\1"),
    "tokenizer.ggml.add_space_prefix": (BOOL, b"\1"),
    "tokenizer.chat_template": (STRING, text("{{ messages }}")),
}


def whole_file(changes: dict | None = None, factors: tuple = (F32, 4)) -> bytes:
    """A small Llama with its tokenizer and the frequencies of Llama 3."""
    kind, count = factors
    scaled = Rope(500.0, Llama3(8.0, 1.0, 4.0, 32))
    divisors = rope.inverse_frequencies(Rope(500.0), 8) / rope.inverse_frequencies(scaled, 8)
    data = np.zeros(8 * 32 + 32, np.float32)
    data[8 * 32 : 8 * 32 + 4] = divisors
    tensors = (
        tensor("token_embd.weight", (32, 8)),
        tensor("rope_freqs.weight", (count,), kind, 4 * 8 * 32),
    )
    values = VALUES | (changes or {})
    entries = tuple(entry(key, kind, value) for key, (kind, value) in values.items())
    return gguf_bytes(entries, tensors, data.tobytes())


def open_whole(path: Path) -> list[int]:
    checkpoint = resolve.resolve(str(path)).open(None)
    return checkpoint.load_tokenizer().encode("aab")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def test_the_whole_file_is_sound(tmp_path):
    path = tmp_path / "whole.gguf"
    path.write_bytes(whole_file())
    assert open_whole(path) == [1, 6, 7]
    header = gguf_file.open_gguf(path)
    assert gguf_metadata.read_config(header).layers[0].mixer.rope == Rope(
        500.0, Llama3(8.0, 1.0, 4.0, 32)
    )


CRAFTED = {
    "factors of integers": (whole_file(factors=(I32, 4)), "has type I32, which is no weight"),
    "few factors": (whole_file(factors=(F32, 3)), "expected [4]"),
    "end as an array": (
        whole_file({"tokenizer.ggml.eos_token_id": numbers(*range(2000))}),
        "eos_token_id array([ 0, 1,",
    ),
    "end as texts": (
        whole_file({"tokenizer.ggml.eos_token_id": words("a")}),
        "eos_token_id StringArray",
    ),
    "parts as an array": (whole_file({"split.count": numbers(1, 1)}), "'split.count' is not a num"),
    "one of several parts": (whole_file({"split.count": number(3)}), "one part of 3 of a split GG"),
    "no parts": (whole_file({"split.count": number(0)}), "split.count=0; valid: 1 to 1024"),
    "countless parts": (whole_file({"split.count": number(1 << 31)}), "valid: 1 to 1024"),
    "architecture": (
        whole_file({"general.architecture": numbers(*range(2000))}),
        "valid: llama, smollm3",
    ),
    "long token": (
        whole_file({"tokenizer.ggml.tokens": words(*TOKENS[:-1], "a" * (1 << 20))}),
        "token 7 has 1048576 characters; at most 1024",
    ),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_a_crafted_file_is_refused_by_name(case, tmp_path):
    data, expected = CRAFTED[case]
    path = tmp_path / "crafted.gguf"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        open_whole(path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).count(str(path)) == 1 and time.process_time() - start < 2


ANY_VALUE = st.one_of(
    st.integers(0, 2**32 - 1).map(number),
    st.integers(0, 9).map(number),
    st.floats(width=32).map(lambda value: (FLOAT32, struct.pack("<f", value))),
    st.sampled_from([b"\0", b"\1"]).map(lambda value: (BOOL, value)),
    st.text(max_size=9).map(lambda value: (STRING, text(value.encode(errors="replace")))),
    st.lists(st.integers(0, 9), max_size=9).map(lambda values: numbers(*values)),
    st.lists(st.floats(width=32), max_size=9).map(lambda values: floats(*values)),
    st.lists(st.sampled_from([*TOKENS, "", " ", b"\xff"]), max_size=9).map(lambda v: words(*v)),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    changes=st.dictionaries(st.sampled_from(sorted(VALUES)), ANY_VALUE, min_size=1, max_size=3),
    factors=st.tuples(st.sampled_from([F32, I32, 24, 30]), st.sampled_from([1, 4])),
)
def test_metadata_of_any_type_is_read_or_refused_but_never_crashes(tmp_path, changes, factors):
    path = tmp_path / "fuzzed.gguf"
    path.write_bytes(whole_file(changes, factors))
    try:
        open_whole(path)
    except InputError as error:
        assert "\n" not in str(error)
