"""Hub ids: one commit for all files, only what is read, the client's cache and offline mode."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants, utils

from configs.errors import InputError
from inference.checkpoints import resolve
from inference.checkpoints.hf import hub
from layers import decoder, params
from tests.fake_hub import FakeHub
from tests.scripts import apps

GOLDEN = Path(__file__).parents[2] / "golden"
UNREAD = {
    "README.md": b"a card",
    "pytorch_model.bin": b"\x80\x04.",
    "training_args.bin": b"\x80\x04.",
    "consolidated.safetensors": b"the same again",
    "model.fp16.safetensors": b"the same again",
    "onnx/model.safetensors": b"the same again",
    "original/params.json": b"{}",
    "modeling_tiny.py": b"import os",
}


def files_of(case: str) -> dict[str, bytes]:
    folder = GOLDEN / case
    return {
        p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".json", ".safetensors")
    }


@pytest.fixture
def fake(tmp_path, monkeypatch):
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE",
        server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )  # fmt: skip
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    utils.disable_progress_bars()
    yield server
    server.close()


def load(model: str) -> dict[str, np.ndarray]:
    resolved = resolve.resolve(model)
    loaded = resolved.open(None).load_params(decoder.param_infos(resolved.config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


def refusal(model: str) -> str:
    with pytest.raises(InputError) as caught:
        load(model)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"cannot fetch {model} from the Hugging Face")
    return message


@pytest.mark.parametrize("case", ["llama-tokenizer", "llama-mha-sharded"])
def test_a_repository_is_the_directory_it_was_made_of(case, fake):
    fake.publish("owner/tiny", files_of(case) | UNREAD)
    found, expected = load("owner/tiny"), load(str(GOLDEN / case))
    assert resolve.resolve("owner/tiny").config.name == "tiny"
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value)
    asked = [path for _, path in fake.requests if "/resolve/" in path]
    assert asked and not [path for path in asked if path.split("/", 5)[-1] in UNREAD]
    if case == "llama-tokenizer":
        assert resolve.resolve("owner/tiny").open(None).load_tokenizer().encode("a b")


@pytest.mark.parametrize("name", hub.QUANTIZED)
def test_quantized_weights_are_refused_before_they_are_fetched(name, fake):
    fake.publish("owner/gptq", files_of("llama-tokenizer") | {name: b'{"bits": 4}'})
    with pytest.raises(InputError, match=f"{name}: weights quantized like this are not served"):
        resolve.resolve("owner/gptq")
    assert not [path for _, path in fake.requests if path.endswith(".safetensors")]


def test_every_file_is_of_the_commit_first_seen(fake):
    """The repository moves on after each request."""
    first = fake.publish("owner/tiny", files_of("llama-mha-sharded"))
    moved = {"config.json": b"moved"}
    fake.after_request = lambda path: "owner" in path and fake.publish("owner/tiny", moved)
    assert load("owner/tiny")
    asked = [path for _, path in fake.requests if "owner" in path]
    assert asked[0] == "/api/models/owner/tiny" and len(asked) > 5
    assert all(first in path for path in asked[1:])


def test_a_revision_is_a_branch_a_tag_or_a_commit(fake):
    old = fake.publish("owner/tiny", files_of("llama-mqa-float32"), revision="v1.0")
    fake.publish("owner/tiny", files_of("llama-mha-sharded"))
    expected = load(str(GOLDEN / "llama-mqa-float32"))
    for revision in ("v1.0", old):
        found = load(f"owner/tiny@{revision}")
        np.testing.assert_array_equal(found["embed/table"], expected["embed/table"])
    assert load("owner/tiny")["embed/table"].shape != expected["embed/table"].shape
    assert "it has no such revision" in refusal("owner/tiny@v2.0")


def test_offline_is_the_cache_alone(fake, monkeypatch):
    fake.publish("owner/tiny", files_of("llama-mha-sharded"))
    fake.publish("owner/part", files_of("llama-mha-sharded"))
    expected = load("owner/tiny")
    hub.open_snapshot("owner/part")  # nothing but the configuration
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fake.requests.clear()
    np.testing.assert_array_equal(load("owner/tiny")["final_norm"], expected["final_norm"])
    assert "HF_HUB_OFFLINE is set and the cache does not hold" in refusal("owner/absent")
    with pytest.raises(InputError) as caught:
        load("owner/part")
    assert "\n" not in str(caught.value)
    assert not fake.requests


def test_a_hub_that_is_gone_leaves_the_cache(fake):
    fake.publish("owner/tiny", files_of("llama-mha-sharded"))
    expected = load("owner/tiny")
    fake.close()
    np.testing.assert_array_equal(load("owner/tiny")["final_norm"], expected["final_norm"])
    assert "cannot be reached and the cache does not hold" in refusal("owner/absent")


def test_refusals_are_one_line(fake):
    fake.refusals = {
        "owner/gated": (403, "GatedRepo"), "owner/private": (401, ""), "owner/gone": (410, ""),
        "owner/broken": (500, ""),
    }  # fmt: skip
    fake.publish("owner/gguf", {"model.gguf": b"GGUF"})
    assert "accept its terms at huggingface.co/owner/gated, then set HF_TOKEN" in refusal(
        "owner/gated"
    )
    assert "not for this HF_TOKEN, or it needs one (status 401)" in refusal("owner/private")
    absent = refusal("owner/absent")
    assert "there is no such repository, or it is private" in absent
    assert absent.endswith("; nor is there a file or directory owner/absent")
    assert "it holds no config.json: not a model" in refusal("owner/gguf")
    assert "the hub answered with status 410" in refusal("owner/gone")
    assert "cannot be reached and the cache" in refusal("owner/broken")


def test_an_index_that_leads_elsewhere_is_refused(fake):
    files = files_of("llama-mha-sharded")
    index = json.loads(files["model.safetensors.index.json"])
    for target in ("../x.safetensors", "pytorch_model.bin", "*.safetensors/../x"):
        index["weight_map"]["model.norm.weight"] = target
        files["model.safetensors.index.json"] = json.dumps(index).encode()
        fake.publish("owner/tiny", files)
        with pytest.raises(InputError, match="valid: a .safetensors file of this directory"):
            load("owner/tiny")


@pytest.mark.parametrize(
    "model", ["owner/..", "../tiny", "a/b/c", "owner/tiny@", "owner/tiny@a b", "/owner", "o wner/x"]
)
def test_what_is_no_id_is_not_asked_for(model, fake):
    with pytest.raises(InputError, match="no model .* valid: a preset"):
        resolve.resolve(model)
    assert not fake.requests


def test_a_script_takes_an_id(fake, tmp_path):
    """With the environment alone: endpoint, cache, then offline."""
    fake.publish("owner/tiny", files_of("llama-tokenizer"))
    environment = {"HF_ENDPOINT": fake.endpoint, "HF_HOME": str(tmp_path / "home")}
    published = GOLDEN / "llama-tokenizer"
    expected, tokenizer = load(str(published)), (published / "tokenizer.json").read_bytes()
    for is_offline in "01":
        if is_offline == "1":
            fake.close()
        flags = ["--model=owner/tiny", f"--output={tmp_path / is_offline}"]
        more = environment | {"HF_HUB_OFFLINE": is_offline}
        ran = apps.start("convert", *flags, cache=tmp_path / "cache", **more)
        assert ran.status == 0, ran.err
        found = load(str(tmp_path / is_offline))
        assert (tmp_path / is_offline / "tokenizer.json").read_bytes() == tokenizer
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value)
