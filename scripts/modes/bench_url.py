"""`bench --url`: a server of OpenAI's interface, measured as a client sees it."""

import dataclasses
import importlib.util
import random
from typing import Any

from configs.errors import InputError
from configs.workload import Workload
from scripts import common, interrupts
from scripts.flags import seed_flag, workload_flags
from scripts.flags.requests import key_flag


@dataclasses.dataclass(frozen=True)
class Asked:
    """What flags say beside the workload.

    Attributes:
        url: of the server.
        model: as the server names it; None: the first that it lists.
        endpoint: path of completions or of chats.
        dataset, dataset_path: where prompts are from.
        as_text: random prompts are words.
        vocab_size: random ids are below it.
        concurrency: requests at a time, of a closed workload; empty: all.
        goodput: what a good answer keeps, or None.
    """

    url: str
    model: str | None
    endpoint: str
    dataset: str
    dataset_path: str | None
    as_text: bool
    vocab_size: int
    concurrency: list[int]
    goodput: str | None


def run(asked: Asked) -> None:
    """One load, and its figures."""
    for name in ("httptools", "msgspec", "uvloop"):
        if importlib.util.find_spec(name) is None:
            raise InputError("--url needs more packages: pip install '.[serve]'")
    from inference.http_client import until

    workload = _workload(asked)
    with interrupts.Deferred() as interrupt:
        if not until.run(_run(asked, workload), lambda: interrupt.asked):
            raise KeyboardInterrupt


async def _run(asked: Asked, workload: Workload) -> None:
    from inference.benchmark.remote import load, results
    from inference.http_client.address import Address, read_key
    from inference.http_client.connections import Connections
    from scripts.reports import url_text

    goodput = None if asked.goodput is None else results.Goodput.parse(asked.goodput)
    key = read_key(key_flag.API_KEY_FILE.value)
    connections = Connections(Address.parse(f"--url={asked.url}", asked.url, key))
    model = asked.model or await load.first_model(connections)
    requests = await _requests(asked, workload, connections, model)
    await load.check(connections, requests[0], model, asked.endpoint)
    with common.bars() as progress:
        sent = await load.send(
            connections, requests, model, asked.endpoint, workload.concurrency,
            lambda done: progress(done, len(requests), "answers"),
        )  # fmt: skip
    connections.close()
    found = results.requested(model, asked.endpoint, len(requests), workload.rate)
    found |= {"burstiness": workload.burstiness, "max_concurrency": workload.concurrency}
    found |= {"dataset": asked.dataset, "seed": workload.seed}
    found |= results.figures(sent, goodput)
    if not found["completed"]:
        raise InputError(f"no request was answered: {next(iter(found['failures']))}")
    if common.JSON.value:
        common.print_plain(found)
    else:
        url_text.show(found)
    _warn(found, workload, len(requests) - len({each.prompt for each in requests}))


def _workload(asked: Asked) -> Workload:
    """Without --seed another one each time: what a server has cached of an earlier run would be
    found, and be no measure of it.
    """
    if len(asked.concurrency) > 1:
        raise InputError("--url measures one --concurrency at a time: give one number")
    if asked.concurrency and workload_flags.is_open():
        raise InputError("--concurrency goes with --workload=closed")
    if (asked.dataset in ("sharegpt", "custom")) != (asked.dataset_path is not None):
        raise InputError("--dataset_path goes with --dataset=sharegpt or custom, which need it")
    defaults: dict[str, Any] = {}
    if asked.dataset == "prefix_repetition":
        defaults = {"prefix_tokens": 256, "prefix_share": 1.0, "num_prefixes": 10}
    workload = workload_flags.read(None, **defaults)
    if workload.kind == "trace" and asked.dataset != "random":
        raise InputError("a trace has its own prompts: leave --dataset out")
    size = asked.concurrency[0] if asked.concurrency else workload.num_requests
    if workload.kind == "closed":
        workload = dataclasses.replace(workload, concurrency=size)
    if seed_flag.SEED.value is None:
        workload = dataclasses.replace(workload, seed=random.SystemRandom().randrange(1 << 32))
    return workload


async def _requests(asked: Asked, workload: Workload, connections: Any, model: str) -> list[Any]:
    from inference.benchmark.remote import load, prompts

    if workload.trace is not None:
        found = prompts.from_trace(
            workload.trace, workload.num_requests, workload.seed, asked.vocab_size
        )
    elif asked.dataset_path is None:
        as_text = asked.as_text or asked.endpoint == load.CHAT
        found = prompts.drawn(workload, asked.vocab_size, as_text)
    else:
        pairs: Any
        if asked.dataset == "custom":
            pairs = prompts.read_custom(asked.dataset_path)
        else:
            counting = prompts.counting(connections, model)
            limit = workload.num_requests or 0
            pairs = await prompts.read_sharegpt(asked.dataset_path, counting, limit, workload.seed)
        found = prompts.at_times_of(workload, pairs)
    if asked.endpoint == load.CHAT and not all(isinstance(each.prompt, str) for each in found):
        raise InputError(f"{load.CHAT} takes texts: leave token ids and lengths out")
    return found


def _warn(found: dict[str, Any], workload: Workload, num_repeated: int) -> None:
    """Of what makes figures mean something else: the same prompt twice."""
    if num_repeated:
        common.say(f"{num_repeated} of {found['num_prompts']} prompts are those of others again")
    cached, total = found["cached_tokens"], found["total_input_tokens"]
    if cached:
        common.say(
            f"the server had {cached / max(1, total):.0%} of the prompts' tokens in a cache: "
            "prompts that it has seen, or that share their beginnings"
        )
    elif seed_flag.SEED.value is not None and workload.trace is None:
        common.say(
            f"--seed={workload.seed} asks the same again: a server that keeps prefixes answers a "
            "second run sooner"
        )
