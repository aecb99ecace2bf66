"""Decides which credentials in the environment of `tether up` are withheld from which services.

A variable is a credential if its name matches `CREDENTIAL` (`WANDB_API_KEY`), or a judge's `key_env` names
it. A service gets a credential only if `HOLDERS` or its own work requires it.
"""

import re
from collections.abc import Iterable

from protocol.topics import Role
from services.settings.sections import Settings
from services.settings.sources import CLOUDS

CREDENTIAL = re.compile(
    r"(^|_)(KEYS?|[A-Z]*APIKEY|TOKENS?|SECRETS?|[A-Z]*PASSWORD|PASSWD|PWD|PASSPHRASE|CREDENTIALS?|PAT|CONNECTION_STRING|HEADERS)(_|$)"
)
"""Pattern of the names of variables with credentials."""
WORKING_DIRECTORIES = ("PWD", "OLDPWD")
"""Shell variables without credentials that match `CREDENTIAL`."""
READS_MODELS = frozenset({Role.ROLLOUT, Role.REWARD, Role.TRAINER, Role.EVALUATION})
USERS_CODE = frozenset({Role.ROLLOUT, Role.REWARD, Role.EVALUATION})
"""Services that run environments and rewards of the user, which may need any credential."""
HOLDERS = {
    ("WANDB_", "MLFLOW_", "DATABRICKS_", "TRACKIO_", "OTEL_"): frozenset({Role.TRACKING}),
    ("HF_", "HUGGING_FACE_", "HUGGINGFACE_"): READS_MODELS,
}
"""Prefixes of variables -> services that get such a credential; others go to services with user code."""
SCORES = frozenset({Role.REWARD, Role.EVALUATION})
"""Services that call judges."""
GENERATES = frozenset({Role.ROLLOUT, Role.EVALUATION})
"""Services with engines, which read versions from an object store if `weights.url` is set."""


def withheld_from(role: Role, settings: Settings, names: Iterable[str]) -> frozenset[str]:
    """Return the subset of `names` that a service must not get."""
    judges = {str(verifier.options.get("key_env", "")) for verifier in settings.reward.verifiers}
    stores = {Role.TRAINER, *(GENERATES if settings.weights.url else ())}
    return frozenset(name for name in names if role not in _holders(name, judges, frozenset(stores)))


def _holders(name: str, judges: set[str], stores: frozenset[Role]) -> frozenset[Role]:
    """Return the services that get a variable."""
    if name in judges:
        return SCORES
    if name in WORKING_DIRECTORIES or not CREDENTIAL.search(name.upper()):
        return frozenset(Role)
    holders = {**HOLDERS, CLOUDS: stores}
    return next((roles for prefixes, roles in holders.items() if name.startswith(prefixes)), USERS_CODE)
