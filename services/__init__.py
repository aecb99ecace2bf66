"""Runs the processes of tether; only this package reads settings and connects to the ledger."""

from services.runtime.import_path import is_service, protect_imports

protect_imports()
if is_service():
    from protocol.host.prctl import keep_private  # ours for certain only now

    keep_private()  # before the service's slow imports: its environment variables may contain passwords
