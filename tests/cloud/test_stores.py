"""Checkpoints at s3:// and gs://, against emulators of both; `make test-cloud` runs this."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from safetensors.numpy import save_file

pytest.importorskip("moto", reason="make test-cloud has it")
pytest.importorskip("obstore", reason="make test-cloud has it")

from configs.errors import InputError
from inference.checkpoints import resolve
from inference.files import contents, mirror, user_files
from layers import decoder, params
from tests.cloud import conftest, servers
from tests.inference.checkpoints import test_convert, test_gguf
from tests.scripts.test_hosts import free_port

ROOT = Path(__file__).parents[2]
TINY = test_convert.GOLDEN / "llama-tokenizer"
SHARDED = test_convert.GOLDEN / "llama-mha-sharded"


def _values(model):
    checkpoint = resolve.resolve(str(model)).open(None)
    loaded = checkpoint.load_params(decoder.param_infos(checkpoint.config))
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


def _check_same(model, local):
    actual, expected = _values(model), _values(local)
    assert actual.keys() == expected.keys()
    for path in expected:
        np.testing.assert_array_equal(actual[path], expected[path], path)


def _generate(model, *arguments, env=None):
    command = [sys.executable, "-m", "scripts.generate", f"--model={model}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=240)


def test_a_cut_connection_at_every_tenth_range_completes(store, reaches):
    relay = reaches(store, every=10)
    url = servers.upload(store, SHARDED, "sharded")
    _check_same(url, SHARDED)
    assert relay.num_cut == relay.num_ranges // 10 > 0
    num_ranges = relay.num_ranges
    _values(url)
    assert relay.num_ranges == num_ranges  # all was kept


@pytest.mark.parametrize("kind", ["native", "gguf"])
def test_other_formats(kind, store, reaches, tmp_path):
    relay = reaches(store)
    if kind == "native":
        local = test_convert.run(test_convert.TINY, tmp_path / "native", "orbax")
        url = servers.upload(store, local, "native")
    else:
        config = test_gguf.LLAMA
        tensors = test_gguf.tensors_of(config, test_gguf.random_params(config))
        local = test_gguf.write_gguf(tmp_path / "tiny.gguf", config, tensors)
        store.put("tiny.gguf", local.read_bytes())
        url = f"{store.scheme}://{servers.BUCKET}/tiny.gguf"
    _check_same(url, local)
    assert relay.num_ranges


def _wide(folder):
    """Matrices so wide that the half of a row is more than a gap that is read along."""
    width, inner, heads = 16, 40_960, 320
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return rng.standard_normal(shape, np.float32)

    layer = {
        "self_attn.q_proj": (heads * 128, width), "self_attn.k_proj": (256, width),
        "self_attn.v_proj": (256, width), "self_attn.o_proj": (width, heads * 128),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    shards = [{"model.embed_tokens.weight": matrix(512, width), "model.norm.weight": matrix(width)}]
    for index in range(2):
        prefix = f"model.layers.{index}"
        shard = {f"{prefix}.{name}.weight": matrix(*shape) for name, shape in layer.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shards.append(shard | {f"{prefix}.{norm}.weight": matrix(width) for norm in norms})
    folder.mkdir()
    names = [f"model-{index:05}-of-00003.safetensors" for index in (1, 2, 3)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True)
                  for tensor in shard}  # fmt: skip
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((TINY / "config.json").read_text()) | {
        "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 512,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_each_of_two_hosts_reads_half(store, tmp_path):
    local = _wide(tmp_path / "wide")
    url = servers.upload(store, local, "wide")
    total = sum(file.stat().st_size for file in local.glob("*.safetensors"))
    for chip in range(2):
        relay = servers.Relay(store.port)
        env = servers.environment(store, relay, tmp_path / f"cache-{chip}")
        digests = [
            subprocess.run(
                [sys.executable, "-m", "tests.cloud.host", str(model), str(chip)],
                capture_output=True, text=True, cwd=ROOT, env=env, check=True,
            ).stdout
            for model in (url, local)
        ]  # fmt: skip
        relay.close()
        assert digests[0] == digests[1]
        sent = sum(size for path, size in relay.sent.items() if path.endswith("safetensors"))
        print(f"{store.scheme}: host {chip} read {sent / total:.4f} of {total:,} bytes")
        assert 0.5 <= sent / total < 0.5005


@pytest.mark.parametrize("every", [None, 10])
def test_generated_text_is_that_of_the_directory(every, store, tmp_path):
    url = servers.upload(store, TINY, "tiny")
    relay = servers.Relay(store.port, every)
    env = servers.environment(store, relay, tmp_path / "cache")
    request = "--prompt=the cat sat", "--max_new_tokens=12", "--json", "--set=model.dtype=float32"
    run, expected = _generate(url, *request, env=env), _generate(TINY, *request)
    relay.close()
    assert run.returncode == 0, run.stderr
    results = [json.loads(output.stdout)["results"] for output in (run, expected)]
    assert results[0][0]["token_ids"] == results[1][0]["token_ids"]
    assert "the-secret-of-a-key" not in run.stdout + run.stderr


def test_two_hosts_give_the_text_of_one(s3, tmp_path):
    url = servers.upload(s3, TINY, "hosts")
    relay = servers.Relay(s3.port, every=10)
    request = ["--prompt=the cat sat", "--max_new_tokens=8", "--json", "--mesh=model=2"]
    command = [sys.executable, "-m", "scripts.generate", f"--model={url}", *request, "--hosts=2",
               f"--coordinator=localhost:{free_port()}"]  # fmt: skip
    hosts = [
        subprocess.Popen(
            [*command, f"--host_index={index}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=ROOT, env=servers.environment(s3, relay, tmp_path / f"cache-{index}"),
        )
        for index in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=240) for process in hosts]
    relay.close()
    assert [process.returncode for process in hosts] == [0, 0], ended
    expected = json.loads(_generate(TINY, *request).stdout)["results"][0]["token_ids"]
    assert json.loads(ended[0][0])["results"][0]["token_ids"] == expected
    assert relay.num_cut > 0


def test_a_wrong_checksum_is_named_and_nothing_is_kept(store, reaches, tmp_path):
    relay = reaches(store)
    url = servers.upload(store, TINY, "checked")

    def damage(path, body):
        is_tokenizer = path.split("?")[0].endswith(("tokenizer.json", "tokenizer%2Ejson"))
        return body.replace(b"a", b"b") if is_tokenizer else body

    relay.damage = damage
    with pytest.raises(InputError, match=rf"{url}/tokenizer.json: its MD5 is \w+, the store says"):
        resolve.resolve(url)
    assert not list((tmp_path / "cache").rglob("*.json*"))
    relay.damage = None
    _check_same(url, TINY)


def test_damage_in_a_native_array_is_named_and_forgotten(store, reaches, tmp_path):
    relay = reaches(store)
    local = test_convert.run(test_convert.TINY, tmp_path / "native", "orbax")
    url = servers.upload(store, local, "damaged")
    array = next(path for path in (local / "params").glob("layers.*/0.0"))
    size, name = array.stat().st_size, array.parent.name
    relay.damage = lambda path, body: (
        bytes([body[0] ^ 1]) + body[1:] if len(body) == size and name in unquote(path) else body
    )
    with pytest.raises(InputError, match=rf"{name}/0.0: not what was written"):
        _values(url)
    relay.damage = None
    _check_same(url, local)


def test_what_is_kept_and_damaged_is_read_again(s3, reaches, tmp_path):
    relay = reaches(s3)
    url = servers.upload(s3, TINY, "kept")
    _values(url)
    pieces = list((tmp_path / "cache" / "stores" / "pieces").glob("*/*"))
    for piece in pieces:
        content = bytearray(piece.read_bytes())
        content[0] ^= 1
        piece.write_bytes(content)
    num_ranges = relay.num_ranges
    _check_same(url, TINY)
    assert relay.num_ranges > num_ranges


def test_an_object_that_changes_is_another_mirror(s3, reaches):
    reaches(s3)
    url = servers.upload(s3, TINY, "changing")
    first = mirror.of(url)
    _values(url)
    config = (TINY / "config.json").read_bytes() + b"\n"
    s3.put("changing/config.json", config)
    second = mirror.of(url)
    assert first != second and (second / "config.json").read_bytes() == config


def test_an_object_that_changes_while_it_is_read_is_named(s3, reaches):
    reaches(s3)
    url = servers.upload(s3, TINY, "meanwhile")
    checkpoint = resolve.resolve(url).open(None)
    s3.put("meanwhile/model.safetensors", (TINY / "model.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match="it was changed while it was read"):
        checkpoint.load_params(decoder.param_infos(checkpoint.config))


@pytest.mark.parametrize("name, expected", [
    ("no-such-bucket/model", "there is no bucket"),
    ("models/nothing-there", "valid: the folder of a checkpoint, or a .gguf file, in a bucket"),
    ("models/nothing.gguf", "valid: the folder of a checkpoint, or a .gguf file, in a bucket"),
    ("Models/x", "names no object; valid: s3://BUCKET/PATH or gs://BUCKET/PATH"),
    ("models/../x", "names no object; valid: s3://BUCKET/PATH or gs://BUCKET/PATH"),
])  # fmt: skip
def test_what_is_not_there_is_one_line(name, expected, store, reaches):
    reaches(store)
    with pytest.raises(InputError) as caught:
        resolve.resolve(f"{store.scheme}://{name}")
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_not_allowed_names_the_credentials(store, reaches):
    relay = reaches(store)
    relay.refuses = True
    names = {"s3": "AWS_ACCESS_KEY_ID", "gs": "GOOGLE_APPLICATION_CREDENTIALS"}[store.scheme]
    with pytest.raises(InputError, match=f"not allowed; valid credentials: {names}"):
        resolve.resolve(f"{store.scheme}://{servers.BUCKET}/x")


def test_files_are_read_and_written(s3, reaches, tmp_path):
    relay = reaches(s3)
    servers.upload(s3, TINY, "files")
    requests = "".join(json.dumps({"prompt": text}) + "\n" for text in ("the cat", "rain fell"))
    s3.put("files/requests.jsonl", requests.encode())
    url = f"s3://{servers.BUCKET}/files"
    env = servers.environment(s3, relay, tmp_path / "cache")
    flags = f"--input={url}/requests.jsonl", f"--output={url}/out/a.jsonl", "--max_new_tokens=4"
    run = _generate(url, *flags, env=env)
    assert run.returncode == 0, run.stderr
    lines = user_files.read_text(f"{url}/out/a.jsonl", 1 << 20).splitlines()
    assert len(lines) == 2 and all(json.loads(line)["token_ids"] for line in lines)
    again = _generate(url, *flags, env=env)
    assert again.returncode == 1 and "holds results already" in again.stderr


def test_a_whole_mirror_needs_the_store_no_longer(s3, reaches):
    relay = reaches(s3)
    folder = mirror.of(servers.upload(s3, SHARDED, "whole"))
    mirror.complete(folder)
    relay.close()
    assert all(contents.stored_object(path) is None for path in folder.rglob("*"))
    _check_same(folder, SHARDED)


def test_the_bound_holds(s3, reaches, monkeypatch, tmp_path):
    reaches(s3)
    url = servers.upload(s3, TINY, "bounded")
    monkeypatch.setenv("RIDGELINE_STORE_GB", "0.00004")
    conftest.start_anew(monkeypatch)
    _check_same(url, TINY)
    pieces = tmp_path / "cache" / "stores"
    assert sum(file.stat().st_size for file in pieces.rglob("*") if file.is_file()) <= 40_000
    shutil.rmtree(pieces)
