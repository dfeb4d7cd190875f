"""What `--help` shows, and command lines as they are written elsewhere."""

import importlib
import re

import pytest

from scripts import serve, usage
from tests.scripts import apps

PAGES = [apps.ROOT / "README.md", apps.ROOT / "docs" / "quickstart.md"]
README = "\n".join(page.read_text("utf-8") for page in PAGES)


def readme_flags() -> set[tuple[str, str]]:
    """(app, flag) of each command in README and quickstart, and of the server's flags there."""
    commands = re.findall(r"scripts\.(\w+)([^`\n]*)", README)
    commands = [(app, words.partition("#")[0]) for app, words in commands]
    of_server = README[README.index("It listens on") : README.index("From Python:")]
    commands += [("serve", span) for span in re.findall(r"`(--[^`]*)`", of_server)]
    commands += [("generate", "--model --set --config")]
    found = {(app, flag) for app, words in commands for flag in re.findall(r"--([a-z_]+)", words)}
    return found - {("serve", "help")}


@pytest.fixture
def help_of(monkeypatch, capfd):
    def run(name: str) -> str:
        ran = apps.call(importlib.import_module(f"scripts.{name}"), monkeypatch, capfd, "--help")
        assert ran.status == 0 and ran.err == ""
        return ran.out

    return run


def test_help_shows_every_flag_of_the_readme(help_of):
    expected = readme_flags()
    assert len({app for app, _ in expected}) >= 10 and len(expected) > 45
    assert {("serve", "api_key_file"), ("serve", "max_num_seqs"), ("bench", "url")} <= expected
    pages = {app: help_of(app) for app in sorted({app for app, _ in expected})}
    missing = [
        f"{app} --{flag}"
        for app, flag in sorted(expected)
        if not re.search(rf"^  --(\[no\])?{flag}\b", pages[app], re.MULTILINE)
    ]
    assert not missing
    for page in pages.values():
        assert max(map(len, page.splitlines())) <= 100 and "repeat this option" not in page
    titles = ["Model:", "HTTP:", "Serving:"]
    assert [line for line in pages["serve"].splitlines() if line in titles] == titles


def test_what_an_app_refuses_is_not_in_its_help(help_of):
    page = help_of("serve")
    assert "--engine_socket" not in page and "--json" not in page
    assert "--json " in help_of("generate") and "--weights" not in help_of("quantize")


@pytest.mark.parametrize("words, expected", [
    (["--max-model-len=64", "--no-warm-up"], ["--max_model_len=64", "--nowarm_up"]),
    (["--max-model-len", "--max-num-seqs", "--max-num-seqs=2"],
     ["--max_model_len", "--max-num-seqs", "--max_num_seqs=2"]),
    (["--set", "a-b", "model-x", "--max-num-seqs=2"],
     ["--set", "a-b", "model-x", "--max-num-seqs=2"]),
    (["--un-known=1", "--", "--max-num-seqs=2"], ["--un-known=1", "--", "--max-num-seqs=2"]),
])  # fmt: skip
def test_flags_may_have_dashes(words, expected):
    """And values, and what follows the flags, stay as they are."""
    assert usage.with_underscores(["app", *words]) == ["app", *expected]


@pytest.mark.parametrize("words, problem", [
    (["smollm2-135m", "--port=1"], "every input is a flag, as --model=smollm2-135m"),
    (["--max-logprobs=21"], "--max_logprobs is between 0 and 20, not 21"),
    (["--tensor-parallel-size=2"], "'tensor-parallel-size'; here it is --mesh=model=N"),
    (["--max-model-lenn=2"], "Did you mean: max_model_len"),
])  # fmt: skip
def test_flags_of_other_servers_get_a_hint(monkeypatch, capfd, words, problem):
    assert problem in apps.call(serve, monkeypatch, capfd, *words).error


@pytest.mark.parametrize("former, name", [("presence", "presence_penalty"), ("stop_ids", "")])
def test_a_former_flag_is_refused_with_its_name(former, name):
    assert usage.hint(former) == (f"; here it is --{name}" if name else "")
