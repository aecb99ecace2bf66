"""Which services get which credentials of the user who starts a run."""

from dataclasses import replace

import pytest

from protocol.topics import Role
from reward.config import VerifierConfig
from services.launcher.credentials import withheld_from
from services.settings.sections import Settings

ALL = set(Role)
SETTINGS = Settings()
JUDGED = replace(
    SETTINGS,
    reward=replace(SETTINGS.reward, verifiers=(VerifierConfig("judge", options={"key_env": "MY_JUDGE"}),)),
)


@pytest.mark.parametrize(
    ("name", "holders"),
    [
        ("WANDB_API_KEY", {Role.TRACKING}),
        ("MLFLOW_TRACKING_PASSWORD", {Role.TRACKING}),
        ("OTEL_EXPORTER_OTLP_HEADERS", {Role.TRACKING}),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", ALL),
        ("HF_TOKEN", {Role.ROLLOUT, Role.REWARD, Role.TRAINER, Role.EVALUATION}),
        ("AWS_SECRET_ACCESS_KEY", {Role.TRAINER}),
        ("MY_JUDGE", {Role.REWARD, Role.EVALUATION}),
        ("SEARCH_APIKEY", {Role.ROLLOUT, Role.REWARD, Role.EVALUATION}),
        ("PGPASSWORD", {Role.ROLLOUT, Role.REWARD, Role.EVALUATION}),
        ("TOKENIZERS_PARALLELISM", ALL),
        ("HF_HOME", ALL),
        ("WANDB_MODE", ALL),
        ("PWD", ALL),
        ("PATH", ALL),
    ],
)
def test_a_credential_is_inherited_by_those_who_need_it(name: str, holders: set[Role]) -> None:
    assert {role for role in Role if name not in withheld_from(role, JUDGED, [name])} == holders


def test_credentials_of_an_object_store_are_inherited_by_engines_that_read_it() -> None:
    settings = replace(SETTINGS, weights=replace(SETTINGS.weights, transport="http", url="s3://bucket/run"))
    found = {role for role in Role if not withheld_from(role, settings, ["AWS_SECRET_ACCESS_KEY"])}
    assert found == {Role.TRAINER, Role.ROLLOUT, Role.EVALUATION}
