"""From service level objectives to chips: smallest mesh, largest batch and replicas."""

import dataclasses
import math

from configs.errors import InputError
from configs.mesh import Mesh
from inference.planner.deployment import Deployment

_MAX_CHIPS = 64
_MAX_PROCESSES = 8  # of each role
_MAX_RATE = 1e9  # requests a second
# Share of what they can take that replicas are asked for: at all of it, queues grow without end.
UTILIZATION = 0.8


@dataclasses.dataclass(frozen=True)
class Steady:
    """A replica that is never idle: as one request ends, the prompt of the next is run.

    Attributes:
        ttft_s: the decode step in flight, then the request's own prefill; waiting for a place
            comes on top, where requests do not come evenly.
        prefill_s: of that, the prefill.
        tpot_s: mean time between a request's tokens, the prefills of others in between included.
        requests_s: requests that begin and end each second.
        output_tok_s: new tokens of all of them.
    """

    ttft_s: float
    prefill_s: float
    tpot_s: float
    requests_s: float
    output_tok_s: float


def steady(deployment: Deployment, batch: int, context: int, new_tokens: int) -> Steady:
    """What `batch` requests of each replica see; rates are of all replicas.

    In the time that a request lives, the chips run the prompts of its `batch` peers, one at a time
    (each group of chips with requests of its own runs one), and the steps that give it its tokens
    but the first, which its prefill gives where there is one sample.
    """
    decoded = deployment.decoded_tokens(new_tokens)
    steps = decoded / deployment.tokens_per_step
    step_s = deployment.step_seconds(batch, deployment.mean_length(context, new_tokens))
    groups = min(batch, deployment.mesh.num_groups)
    prefill_s = deployment.prompt_seconds(groups, context)
    lives = math.ceil(batch / groups) * prefill_s + steps * step_s
    rate = deployment.replicas * batch / lives
    tpot_s = (lives - prefill_s) / max(1, decoded)
    ttft_s = prefill_s + step_s * (1 + (deployment.samples > 1))
    return Steady(ttft_s, prefill_s, tpot_s, rate, rate * new_tokens * deployment.samples)


@dataclasses.dataclass(frozen=True)
class Disaggregated:
    """Prompts on chips of their own, beside the same chips where each does both.

    Attributes:
        apart: what the sequences see that the mesh decodes, while as many chips as one of its
            groups compute prompts.
        together: what they see on all these chips as groups that do both.
        transfer_bytes: what moves of a prompt: each chip's, or what a connection takes of them.
        transfer_s: how long that takes; its first token waits for it.
        saved_s: seconds of a request that pass with other requests' prompts together, none apart.
        prefill_load: share of the time that the chips of prompts compute.
        pays: what apart is better in: 'rate' (of as many requests at a time, and so their time, the
            queue for prompts included), 'TPOT' alone, or 'nothing'.
        balanced: processes that compute prompts and those that decode, as many of each as give the
            most requests per process.
    """

    apart: Steady
    together: Steady
    transfer_bytes: float
    transfer_s: float
    saved_s: float
    prefill_load: float
    pays: str
    balanced: "Balance"


@dataclasses.dataclass(frozen=True)
class Balance:
    """Processes of each role, and the requests a second of all of them."""

    prefill: int
    decode: int
    requests_s: float


def balance(prefill_rate: float, decode_rate: float) -> Balance:
    """The numbers of processes, each up to `_MAX_PROCESSES`, that leave the least of them idle; of
    equals the fewest.

    Args:
        prefill_rate, decode_rate: requests a second that one process of each role can take.
    """
    counts = range(1, _MAX_PROCESSES + 1)
    balances = [
        Balance(p, d, min(p * prefill_rate, d * decode_rate)) for p in counts for d in counts
    ]

    def worth(one: Balance) -> tuple[float, int]:
        num_processes = one.prefill + one.decode
        return round(one.requests_s / num_processes / prefill_rate, 9), -num_processes

    return max(balances, key=worth)


def disaggregated(
    deployment: Deployment,
    batch: int,
    context: int,
    new_tokens: int,
    bandwidth: float | None = None,
) -> Disaggregated:
    """What a group of chips of its own for prompts is worth to `batch` requests.

    Args:
        bandwidth: bytes a second of the connection by which a prompt's pages move; None: that of
            the chips.

    Raises:
        InputError: a size is out of range.
    """
    deployment.check_lengths(batch, context, new_tokens)
    if new_tokens < 1:
        raise InputError("chips that only decode need new tokens: at least 1, not 0")
    replicas, groups = deployment.replicas, deployment.mesh.num_groups + 1
    mesh = dataclasses.replace(deployment.mesh, data=groups, expert=1)
    together = steady(dataclasses.replace(deployment, mesh=mesh), batch, context, new_tokens)
    sent_s = transfer_s(deployment, context, bandwidth)
    prefill_s = deployment.prompt_seconds(1, context)
    step_s = deployment.step_seconds(batch, deployment.mean_length(context, new_tokens))
    tpot_s = step_s / deployment.tokens_per_step
    ttft_s = prefill_s + sent_s + 2 * step_s  # a step in flight, and one of its last token
    prefill_rate = 1 / max(prefill_s, sent_s)  # pages move while the next prompt is computed
    decode_rate = batch / (2 * step_s + (new_tokens - 1) * tpot_s)
    rate = min(batch / (ttft_s + (new_tokens - 1) * tpot_s), prefill_rate)  # of each side
    total = replicas * rate
    tokens_s = total * new_tokens * deployment.samples
    apart = Steady(ttft_s, prefill_s, tpot_s, total, tokens_s)
    return Disaggregated(
        apart, together, _sent_bytes(deployment, context, bandwidth), sent_s,
        saved_s=(math.ceil(batch / groups) - 1) * prefill_s,
        prefill_load=rate * prefill_s,
        pays=_better_in(apart, together),
        balanced=balance(prefill_rate, decode_rate),
    )  # fmt: skip


def transfer_s(deployment: Deployment, context: int, bandwidth: float | None = None) -> float:
    """Seconds in which the pages of a prompt move to as many other chips: by a connection of
    `bandwidth` bytes a second, or by links; without these through the host's memory, or within it.
    """
    chip = deployment.hardware
    if bandwidth is not None:
        return _sent_bytes(deployment, context, bandwidth) / bandwidth
    link = chip.link_bandwidth or chip.host_bandwidth or chip.read_bandwidth / 2
    return deployment.chip_cache_bytes(context) / link


def _sent_bytes(deployment: Deployment, context: int, bandwidth: float | None) -> float:
    if bandwidth is not None:
        return deployment.sent_cache_bytes(context)
    return deployment.chip_cache_bytes(context) * deployment.mesh.model


def _better_in(apart: Steady, together: Steady) -> str:
    if apart.requests_s >= together.requests_s:
        return "rate"
    return "TPOT" if apart.tpot_s < together.tpot_s else "nothing"


@dataclasses.dataclass(frozen=True)
class Targets:
    """Service level objectives of each request, in seconds; None sets no limit.

    Raises:
        InputError: a limit is not above 0.
    """

    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        for name, limit in dataclasses.asdict(self).items():
            if limit is not None and not 0 < limit < math.inf:
                raise InputError(f"--slo {name} is a number of seconds above 0, not {limit}")

    def is_met(self, rates: Steady) -> bool:
        """Whether both limits hold."""
        return (self.ttft is None or rates.ttft_s <= self.ttft) and (
            self.tpot is None or rates.tpot_s <= self.tpot
        )

    def __str__(self) -> str:
        """As it is given: 'ttft=0.5,tpot=0.03'."""
        limits = dataclasses.asdict(self).items()
        return ",".join(f"{name}={limit:g}" for name, limit in limits if limit is not None)


@dataclasses.dataclass(frozen=True)
class Answer:
    """A mesh that meets the targets.

    Attributes:
        mesh: of one replica.
        batch: most requests at a time that meet them.
        replicas: for the rate asked, busy for at most `UTILIZATION`; 1 without.
        load: share of what they can take that the rate is; None without.
        num_chips: of all replicas.
        replica: what one replica gives at that batch.
        limited_by: what forbids one more request: 'memory', or the targets.
        dollars_per_million: of output tokens while all replicas are busy; None without a price.
    """

    mesh: Mesh
    batch: int
    replicas: int
    load: float | None
    num_chips: int
    replica: Steady
    limited_by: str
    dollars_per_million: float | None


def answers(
    deployment: Deployment, targets: Targets, context: int, new_tokens: int,
    rate: float | None = None,
) -> list[Answer]:  # fmt: skip
    """Every mesh, of up to 64 chips that are linked, that meets the targets, the smallest first;
    of those that divide cached tokens, the best where it serves more than others of as many chips.

    Args:
        deployment: its mesh and replicas are what is asked for.
        rate: requests a second that all replicas together take.

    Raises:
        InputError: none does.
    """
    deployment.check_lengths(1, context, new_tokens)
    if new_tokens < 1:
        raise InputError(f"--slo needs --new_tokens of at least 1, not {new_tokens}")
    if rate is not None and not 0 < rate <= _MAX_RATE:
        raise InputError(
            f"--rate is a number of requests a second above 0 and at most {_MAX_RATE:g}, not {rate}"
        )
    matches, nearest = [], None
    for mesh in meshes(deployment):
        candidate = dataclasses.replace(deployment, mesh=mesh, replicas=1)
        max_batch = candidate.largest_batch(context, new_tokens)
        if not max_batch:
            continue
        alone = steady(candidate, 1, context, new_tokens)
        if nearest is None or alone.tpot_s < nearest[1].tpot_s:
            nearest = mesh, alone
        if targets.is_met(alone):
            matches.append(_answer(candidate, targets, context, new_tokens, rate, max_batch))
    if matches:
        return _without_needless(matches)
    if nearest is None:
        raise InputError(
            f"{deployment.config.name} with one sequence of {context + new_tokens} tokens fits no "
            f"mesh of {deployment.hardware.name}: fewer bits or larger chips"
        )
    raise InputError(
        f"no mesh of {deployment.hardware.name} meets {targets}: the fastest is {nearest[0]} with "
        f" ttft={nearest[1].ttft_s:.3g},tpot={nearest[1].tpot_s:.3g}"
    )


def _without_needless(matches: list[Answer]) -> list[Answer]:
    """Leaves out what divides cached tokens and is not the best of as many chips."""
    best: dict[int, Answer] = {}
    for match in matches:
        other = best.setdefault(match.mesh.num_chips, match)
        if match.replica.requests_s > other.replica.requests_s:
            best[match.mesh.num_chips] = match
    return [match for match in matches
            if match.mesh.context == 1 or match is best[match.mesh.num_chips]]  # fmt: skip


def meshes(deployment: Deployment, max_chips: int = _MAX_CHIPS) -> list[Mesh]:
    """Every mesh of one replica of up to `max_chips` chips that divides the model evenly, as far as
    links join them, by chips; replicas cover `data`. Chips along `context` are 1, 2, 4, ...
    """
    config, candidates = deployment.config, []
    max_chips = int(min(max_chips, deployment.hardware.linked_chips))
    shared = {num_experts for num_experts, _ in config.experts}
    widest = min(config.divided, default=1)
    for expert in [n for n in range(1, max_chips + 1) if all(count % n == 0 for count in shared)]:
        if expert > 1 and not shared:
            break
        for model in range(1, min(max_chips // expert, widest) + 1):
            for doublings in range((max_chips // (expert * model)).bit_length()):
                mesh = Mesh(model=model, expert=expert, context=2**doublings)
                try:
                    dataclasses.replace(deployment, mesh=mesh)
                except InputError:
                    break  # what these cannot divide, twice as many cannot
                candidates.append(mesh)
    return sorted(candidates, key=lambda mesh: (mesh.num_chips, mesh.context, mesh.expert))


def _answer(
    deployment: Deployment, targets: Targets, context: int, new_tokens: int, rate: float | None,
    max_batch: int,
) -> Answer:  # fmt: skip
    """The largest batch of a mesh that meets the targets with one sequence; both times grow with
    the batch.
    """
    batch, limit = 1, max_batch
    while batch < limit:
        middle = (batch + limit + 1) // 2
        if targets.is_met(steady(deployment, middle, context, new_tokens)):
            batch = middle
        else:
            limit = middle - 1
    replica = steady(deployment, batch, context, new_tokens)
    replicas = 1 if rate is None else math.ceil(rate / (UTILIZATION * replica.requests_s))
    load = None if rate is None else rate / (replicas * replica.requests_s)
    chips, price = deployment.mesh.num_chips, deployment.hardware.price_per_hour
    dollars = None if price is None else price * chips / 3600 / replica.output_tok_s * 1e6
    bound = "memory" if batch == max_batch else str(targets)
    return Answer(deployment.mesh, batch, replicas, load, replicas * chips, replica, bound, dollars)
