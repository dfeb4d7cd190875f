"""What is launched: a command of this repository on a target's hosts, whatever starts it."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from configs.hardware.machines import Hosts, Offer
from configs.hardware.targets import Target

PORT, COORDINATOR_PORT = 8000, 9100  # the coordinator takes the next port, too
KEYS = "/etc/ridgeline"  # where the secret of API keys is mounted
CACHE = "/cache"
USER = 10001  # of the image
DRAIN_S = 30
_OTHER_DISK = 20 << 30  # compiled programs and files of a request, beside weights


@dataclasses.dataclass(frozen=True)
class Launch:
    """One command on all hosts of a target.

    Attributes:
        run: name of the file in `configs/runs`.
        app: 'serve', 'generate' or 'bench'.
        words: the module and its flags, without those that say who listens where.
        image: with its tag.
        weight_bytes: of the checkpoint.
        reads_hub: whether hosts fetch all of it to their disks.
        env: variables of the process.
        spot: on machines that may be taken away.
        claim: a PersistentVolumeClaim that is mounted at the cache; None: a local directory.
    """

    run: str
    app: str
    hosts: Hosts
    words: tuple[str, ...]
    image: str
    weight_bytes: float
    reads_hub: bool = True
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    spot: bool = False
    claim: str | None = None

    @property
    def name(self) -> str:
        """A DNS label: 'v5e-8-llama8b'."""
        return re.sub(r"[^a-z0-9]+", "-", self.run.lower()).strip("-")

    @property
    def target(self) -> Target:
        return self.hosts.target

    @property
    def offer(self) -> Offer:
        return self.hosts.offer

    @property
    def serves(self) -> bool:
        return self.app == "serve"

    @property
    def disk_gib(self) -> int:
        """GiB of each host's disk that hold what is fetched and all else."""
        fetched = 1.1 * self.weight_bytes if self.reads_hub else 0
        return math.ceil((fetched + _OTHER_DISK) / (1 << 30))

    def command(self, keys: str) -> list[str]:
        """The module and its flags; a server listens to others, who need a key of that file."""
        if not self.serves:
            return list(self.words)
        listen = ["--host=0.0.0.0", f"--port={PORT}", f"--api_key_file={keys}"]
        return [*self.words, *listen, f"--drain_timeout={DRAIN_S}"]


Resource = dict[str, Any]
