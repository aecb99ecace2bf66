"""Determines this host's index among the trainer's hosts, from `[cluster]`, Slurm or Kubernetes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from protocol.errors import SettingsError
from trainer.config import ClusterConfig

NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
"""Variables with the number of hosts; the first variable that is set counts. Kubernetes sets none."""
NODE_RANKS = ("SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Variables with the index of this host: of srun, and of pods of an indexed Job."""
SEE_S = 30.0
"""Timeout for another host's new file to appear, seconds; network file systems may show it late."""


@dataclass(frozen=True, slots=True)
class HostPlace:
    """Position of one host among the trainer's hosts."""

    number: int = 0
    """Index from 0; host 0 has rank 0."""
    hosts: int = 1
    """Number of hosts."""
    address: str = ""
    """Address of host 0; empty with one host."""
    port: int = 0
    """Port on which host 0 listens."""
    source: str = ""
    """Settings and variables that determined the position."""

    def describe(self) -> str:
        """Return one line for the log."""
        return f"host {self.number} of {self.hosts} rendezvous={self.address}:{self.port} by {self.source}"


def check_cluster(config: ClusterConfig, ranks: int) -> None:
    """Validate the settings that do not depend on this host's position.

    Args:
        ranks: number of ranks on all hosts.

    Raises:
        SettingsError: the message names the setting, its value and valid values.
    """
    if config.rendezvous:
        split_endpoint(config.rendezvous)
    if config.nodes > 1:
        _check_hosts(config.nodes, "setting cluster.nodes", config, ranks)
        if config.node_rank >= config.nodes:
            raise _rank_error("setting cluster.node_rank", config.node_rank, config.nodes)


def find_place(config: ClusterConfig, ranks: int, environ: Mapping[str, str]) -> HostPlace:
    """Return the position of this host.

    Without `cluster.rendezvous` the trainer has one host, even under Slurm, because an allocation of several
    hosts may serve several runs.

    Raises:
        SettingsError: the index or number of hosts is missing, or the ranks cannot be divided between the
            hosts.
    """
    check_cluster(config, ranks)
    hosts, counted = config.nodes, "cluster.nodes"
    if not hosts and config.rendezvous:
        hosts, counted = _from_environ(NODES, environ)
        if not hosts:
            raise SettingsError(
                f"setting cluster.rendezvous: {config.rendezvous!r} is for a trainer on several hosts, and "
                "the number of hosts is unknown; set TETHER_NODES (Slurm's "
                f"{' and '.join(NODES)} are not set)"
            )
    if hosts <= 1:
        return HostPlace()
    _check_hosts(hosts, counted if counted in NODES else f"setting {counted}", config, ranks)
    number, numbered = config.node_rank, "cluster.node_rank"
    if number < 0:
        number, numbered = _from_environ(NODE_RANKS, environ, missing=-1)
        if number < 0:
            raise SettingsError(
                f"setting cluster.node_rank: the trainer is on {hosts} hosts, and this host's index is "
                f"unknown; set TETHER_NODE_RANK to a number from 0 to {hosts - 1} "
                f"({' and '.join(NODE_RANKS)} are not set)"
            )
    if number >= hosts:
        raise _rank_error(numbered if numbered in NODE_RANKS else f"setting {numbered}", number, hosts)
    address, port = split_endpoint(config.rendezvous)
    return HostPlace(number, hosts, address, port, f"{numbered}, {counted}")


def split_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `cluster.rendezvous`.

    Raises:
        SettingsError: the setting is not HOST:PORT.
    """
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path or parts.username is not None:
        raise SettingsError(
            f"setting cluster.rendezvous: {text!r} is not HOST:PORT; give the name or address of host 0, as "
            "the others reach it, and a free port of it, such as trainer-0:29400"
        )
    return host, port


def _check_hosts(hosts: int, counted: str, config: ClusterConfig, ranks: int) -> None:
    if ranks % hosts:
        raise SettingsError(
            f"{counted}: {hosts} hosts cannot divide the {ranks} ranks that [parallel] asks for; "
            f"it can be {_divisors(ranks)}, or change the sizes"
        )
    if not config.rendezvous:
        raise SettingsError(
            f"{counted}: {hosts} hosts need a rendezvous; set cluster.rendezvous "
            "(TETHER_RENDEZVOUS) to HOST:PORT of host 0"
        )


def _divisors(ranks: int) -> str:
    *most, last = [str(count) for count in range(1, ranks + 1) if ranks % count == 0]
    return f"{', '.join(most)} or {last}" if most else last


def _rank_error(what: str, number: int, hosts: int) -> SettingsError:
    return SettingsError(
        f"{what}: {number} is not the number of one of {hosts} hosts; they count from 0 to {hosts - 1}"
    )


def _from_environ(names: Sequence[str], environ: Mapping[str, str], missing: int = 0) -> tuple[int, str]:
    """Return the number in the first variable that is set, and its name; `missing` if none is set."""
    for name in names:
        if text := environ.get(name, ""):
            if not text.isdecimal():
                raise SettingsError(f"variable {name}: {text!r} is not a number")
            return int(text), name
    return missing, ""
