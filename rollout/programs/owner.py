"""Finds the user that programs run as, if it differs from the rollout worker's user."""

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SettingsError

CAP_SYS_PTRACE = 19
SETTING = "setting environment.options.user"


@dataclass(frozen=True, slots=True)
class Owner:
    """User of this machine."""

    uid: int
    gid: int
    groups: Sequence[int]
    variables: dict[str, str]
    """HOME, USER and LOGNAME of the user."""

    def become(self) -> None:
        """Switch this process to the user; called before a program is executed."""
        os.setgroups(self.groups)
        os.setgid(self.gid)
        os.setuid(self.uid)


def find_owner(user: str) -> Owner | None:
    """Return a user of this machine by name; None for an empty name.

    Raises:
        SettingsError: the user is unknown or root, or this process may not start programs as another user and
            find their processes.
    """
    if not user:
        return None
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        raise SettingsError(f"{SETTING}: this machine has no user {user!r}") from None
    if entry.pw_uid == 0:
        raise SettingsError(f"{SETTING}: {user} may read everything that the worker may: name another user")
    if os.geteuid() != 0:
        raise SettingsError(
            f"{SETTING}: only root may run programs as {user}: start the rollout worker as root, or leave "
            "the option empty"
        )
    if not _capabilities() >> CAP_SYS_PTRACE & 1:
        raise SettingsError(
            f"{SETTING}: without CAP_SYS_PTRACE the worker cannot find what programs of {user} leave; "
            "docker: --cap-add=SYS_PTRACE"
        )
    names = {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}
    return Owner(entry.pw_uid, entry.pw_gid, os.getgrouplist(user, entry.pw_gid), names)


def _capabilities() -> int:
    """Return the effective capabilities of this process as a bit mask."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
