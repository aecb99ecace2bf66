"""Makes providers of sandboxes: of tether by name, of the user by `MODULE:CLASS`."""

from dataclasses import dataclass

from protocol.choices import Entry, Registry, checked_name, load
from protocol.errors import SettingsError
from protocol.network.addresses import is_loopback
from protocol.user_code import call, import_attribute
from rollout.config import EnvironmentConfig, SandboxConfig
from rollout.sandboxes.base import Provider

SETTING = "setting environment.sandbox.name"
PROCESS = "process"
"""Name with which tools and programs run as without a sandbox of the episode; it has no provider."""


@dataclass(frozen=True, slots=True)
class ProviderEntry(Entry):
    """Class of a provider."""

    is_elsewhere: bool = False
    """Whether its sandboxes are on other machines, which reach the endpoint by its advertised URL alone."""


PROVIDERS = Registry(
    {
        "bubblewrap": ProviderEntry("rollout.sandboxes.bubblewrap:BubblewrapProvider"),
        "container": ProviderEntry("rollout.sandboxes.container:ContainerProvider"),
        "daytona": ProviderEntry("rollout.sandboxes.remote.daytona:DaytonaProvider", is_elsewhere=True),
        "modal": ProviderEntry("rollout.sandboxes.remote.modal:ModalProvider", is_elsewhere=True),
        "e2b": ProviderEntry("rollout.sandboxes.remote.e2b:E2BProvider", is_elsewhere=True),
    },
    own=ProviderEntry,
)
CALLS = ("start", "clear_left", "forget", "close")


def check_endpoint(config: EnvironmentConfig) -> None:
    """Check that sandboxes on other machines can reach the endpoint of sessions.

    Raises:
        SettingsError: they cannot.
    """
    entry = PROVIDERS.get(config.sandbox.name)
    if entry is not None and entry.is_elsewhere and not config.advertise and is_loopback(config.host):
        raise SettingsError(
            f"setting environment.advertise: it is empty, and a sandbox of {config.sandbox.name!r} does not "
            f"reach {config.host}; set it to the endpoint's address for other machines"
        )


def make_provider(config: SandboxConfig) -> Provider:
    """Return the provider that a section names.

    Raises:
        SettingsError: there is none of this name (suggests the nearest one), it needs a package that is not
            installed, or the user's class does not fit.
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
