"""Makes providers of sandboxes: of tether by name, of the user by `MODULE:CLASS`."""

from protocol.choices import Entry, Registry, checked_name, load
from protocol.errors import SettingsError
from protocol.user_code import call, import_attribute
from rollout.config import SandboxConfig
from rollout.sandboxes.base import Provider

SETTING = "setting environment.sandbox.name"
PROCESS = "process"
"""Name with which tools and programs run as without a sandbox of the episode; it has no provider."""
PROVIDERS = Registry(
    {
        "bubblewrap": Entry("rollout.sandboxes.bubblewrap:BubblewrapProvider"),
        "container": Entry("rollout.sandboxes.container:ContainerProvider"),
        "daytona": Entry("rollout.sandboxes.remote.daytona:DaytonaProvider"),
        "e2b": Entry("rollout.sandboxes.remote.e2b:E2BProvider"),
    },
    own=Entry,
)
CALLS = ("start", "clear_left", "forget", "close")


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
