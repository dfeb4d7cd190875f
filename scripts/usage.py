"""Command lines as people write them, and the page that `--help` shows."""

import shutil
import textwrap
from collections.abc import Collection, Sequence

from absl import flags

from inference.request import FIELDS, FORMER_NAMES

_GROUPS = {  # by the module that defines a flag, or its name; those of the app itself come first
    "json": "Input and output",
    "scripts.common": "Model",
    "scripts.flags.deployment_flags": "Model",
    "scripts.flags.speculation_flags": "Model",
    "scripts.flags.requests.http_flags": "HTTP",
    "scripts.flags.requests.key_flag": "HTTP",
    "scripts.flags.requests.remote_flags": "HTTP",
    "scripts.flags.requests.serving_flags": "Serving",
    "scripts.flags.requests.replicas_flag": "Serving",
    "scripts.flags.sampling_flags": "Sampling",
    "scripts.flags.seed_flag": "Sampling",
    "scripts.flags.workload_flags": "Workload",
    "scripts.flags.price_flag": "Workload",
    "scripts.flags.shared_flags": "Workload",
    "scripts.flags.requests.input_flags": "Input and output",
    "scripts.flags.chat_flag": "Input and output",
    "scripts.flags.output_flag": "Input and output",
    "scripts.flags.file_flags": "Input and output",
    "scripts.flags.json_lines_flag": "Input and output",
    "scripts.flags.text_flag": "Input and output",
    "scripts.flags.placement_flags": "Chips and hosts",
    "scripts.flags.host_flags": "Chips and hosts",
}
_TITLES = (
    *("Model", "HTTP", "Serving", "Sampling", "Workload", "Input and output", "Chips and hosts"),
)
_ELSEWHERE = {  # flags of other servers and of former versions
    "api_key": "api_key_file=FILE, a key a line",
    "dtype": "set=model.dtype=...",
    "enable_prefix_caching": "set=engine.cache.prefix_cache=true, which is the default",
    "kv_cache_dtype": "cache",
    "quantization": "weights",
    "max_tokens": "max_new_tokens",
    "speculative_config": "speculate",
    "tensor_parallel_size": "mesh=model=N",
    "data_parallel_size": "mesh=data=N",
    "tokenizer": "model, which names a directory or file with its tokenizer",
    "uds": "host and --port",
    **{former: name for former, name in FORMER_NAMES.items() if FIELDS[name].has_flag},
}
_KINDS = {"int": "N", "float": "X", "string": "TEXT"}
_INDENT = 28


def with_underscores(argv: Sequence[str]) -> list[str]:
    """The same command line, where flags may have dashes: `--max-model-len=64` is known, too."""
    program, *words = argv
    words_before = [program]
    is_value = False
    for index, word in enumerate(words):
        if not is_value and (word == "--" or not word.startswith("-")):
            return [*words_before, *words[index:]]
        if is_value:
            is_value = False
        else:
            name, equals, value = word.lstrip("-").partition("=")
            if name not in flags.FLAGS and (underscored := _underscored(name)):
                name, word = underscored, f"--{underscored}{equals}{value}"
            is_value = not equals and name in flags.FLAGS and not flags.FLAGS[name].boolean
        words_before.append(word)
    return words_before


def hint(name: str) -> str:
    """What an unknown flag is called here, as the end of a sentence; '' where nothing is known."""
    other = _ELSEWHERE.get(name.replace("-", "_"))
    return "" if other is None else f"; here it is --{other}"


def is_asked_for(argv: Sequence[str]) -> bool:
    words = argv[1 : argv.index("--")] if "--" in argv else argv[1:]
    return any(word in ("--help", "-help", "-h", "-?", "--helpshort") for word in words)


def page(about: str, app: str, unread: Collection[str]) -> str:
    """The page of an app's docstring and of its flags in groups, but `unread`, which it refuses."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    app_title = app.rpartition("/")[2].removesuffix(".py").rpartition(".")[2]
    groups: dict[str, list[flags.Flag]] = {title: [] for title in (app_title, *_TITLES)}
    for flag in {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(app)}.values():
        definer = flags.FLAGS.find_module_defining_flag(flag.name) or ""
        if flag.name not in unread:
            groups[_GROUPS.get(flag.name) or _GROUPS.get(definer, app_title)].append(flag)
    lines = [about.strip()]
    for title, members in groups.items():
        if members:
            lines += ["", f"{title}:"]
        for flag in sorted(members, key=lambda flag: flag.name):
            lines += _described(flag, width)
    return "\n".join([*lines, "", "--helpfull lists every flag of every module.", ""])


def _described(flag: flags.Flag, width: int) -> list[str]:
    head = f"  {_form(flag)}"
    about = " ".join(flag.help.split()).partition("; repeat this option")[0]
    text = textwrap.wrap(about, width - _INDENT)
    indented = [" " * _INDENT + line for line in text]
    if len(head) < _INDENT:
        return [head.ljust(_INDENT) + text[0], *indented[1:]]
    return [head, *indented]


def _form(flag: flags.Flag) -> str:
    """A flag with what it takes: its default, or a word for it."""
    if flag.boolean:
        return f"--[no]{flag.name}" if flag.default else f"--{flag.name}"
    kind = _KINDS.get(flag.flag_type().removeprefix("multi ").split()[-1], "TEXT")
    values = getattr(flag.parser, "enum_values", None)
    if flag.default in (None, "", []):
        return f"--{flag.name}={'|'.join(values) if values else kind}"
    return f"--{flag.name}={str(flag.default_as_str).strip(chr(39))}"


def _underscored(name: str) -> str | None:
    name = name.replace("-", "_")
    if name in flags.FLAGS:
        return name
    opposite = name.removeprefix("no_")
    is_opposite = opposite != name and opposite in flags.FLAGS and flags.FLAGS[opposite].boolean
    return f"no{opposite}" if is_opposite else None
