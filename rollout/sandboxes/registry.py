"""Creates sandbox providers: built-in ones by name, users' by `MODULE:CLASS`."""

from dataclasses import dataclass

from protocol.choices import Entry, Registry, checked_name, load
from protocol.errors import SettingsError
from protocol.network.addresses import is_loopback
from protocol.user_code import call, import_attribute
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.sandboxes.base import Provider

SETTING = "setting environment.sandbox.name"
PROCESS = "process"
"""Sandbox name without a provider: tools and programs run without an episode's sandbox."""


@dataclass(frozen=True, slots=True)
class ProviderEntry(Entry):
    """Class of a provider."""

    is_remote: bool = False
    """Whether its sandboxes run on other machines, which need the endpoint's advertised URL."""


PROVIDERS = Registry(
    {
        "bubblewrap": ProviderEntry("rollout.sandboxes.bubblewrap:BubblewrapProvider"),
        "container": ProviderEntry("rollout.sandboxes.container:ContainerProvider"),
        "daytona": ProviderEntry("rollout.sandboxes.remote.daytona:DaytonaProvider", is_remote=True),
        "modal": ProviderEntry("rollout.sandboxes.remote.modal:ModalProvider", is_remote=True),
        "e2b": ProviderEntry("rollout.sandboxes.remote.e2b:E2BProvider", is_remote=True),
    },
    own=ProviderEntry,
)
CALLS = ("start", "clear_left", "forget", "close")


def check_endpoint(config: EnvironmentConfig) -> None:
    """Check that sandboxes on other machines can reach the session endpoint.

    Raises:
        SettingsError: the endpoint is not reachable from other machines.
    """
    entry = PROVIDERS.get(config.sandbox.name)
    if entry is not None and entry.is_remote and not config.advertise and is_loopback(config.host):
        raise SettingsError(
            f"setting environment.advertise: it is empty, and a sandbox of {config.sandbox.name!r} does not "
            f"reach {config.host}; set it to the endpoint's address for other machines"
        )


def make_provider(config: SandboxConfig) -> Provider:
    """Return the configured provider.

    Raises:
        SettingsError: the name is unknown (the message suggests a similar one), a package is missing, or a
            user's class is invalid.
    """
    if ":" in config.name:
        return _own_provider(config)
    entry = PROVIDERS[checked_name(config.name, (PROCESS, *PROVIDERS), f"{SETTING}: sandbox")]
    try:
        provider: Provider = load(entry.path)(config)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{SETTING}: {config.name!r} needs the package {error.name!r}: pip install {error.name}"
        ) from None
    return provider


def _own_provider(config: SandboxConfig) -> Provider:
    item, file = import_attribute(config.name, SETTING)
    what = f"{SETTING}: {config.name} in {file}"
    provider: Provider = call(what, item, "environment.sandbox", (config,), {})
    if missing := [name for name in CALLS if not callable(getattr(provider, name, None))]:
        raise SettingsError(f"{what} has no `async def {missing[0]}` (rollout/sandboxes/base.py has all)")
    return provider
