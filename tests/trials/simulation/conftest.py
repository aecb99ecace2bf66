from tests.services.ledger.conftest import redis_url, valkey_url

__all__ = ["redis_url", "valkey_url"]
