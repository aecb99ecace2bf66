"""Checks that a worker may have as many connections as its sessions need."""

import resource

from protocol.errors import SettingsError

RESERVED = 256
"""Descriptors of everything else in a worker: sockets of bus and ledger, weights, logs, the engine's own."""


def check_open_files(groups: int, samples: int, each: int) -> None:
    """Compare what the sessions of a full worker need with the limit of the process.

    Args:
        groups: `rollout.groups_in_flight`.
        samples: of a group.
        each: descriptors of one sample, see `Environment.files_per_sample`.

    Raises:
        SettingsError: the limit is lower.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = RESERVED + groups * samples * each
    if each and soft != resource.RLIM_INFINITY and needed > soft:
        raise SettingsError(
            f"setting rollout.groups_in_flight: {groups} groups of {samples} samples are {groups * samples} "
            f"open sessions, which need {needed} open files, and this process may have {soft}: raise that "
            f"limit (`ulimit -n {needed}`), or lower groups_in_flight"
        )
