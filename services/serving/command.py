"""Defines `tether serve`, which serves a model to clients of the OpenAI API."""

import dataclasses
from typing import Annotated

import typer


def serve(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="model directory, name on the hub, settings file, or run")
    ],
    follow: Annotated[
        bool, typer.Option("--follow", help="serve each new version of the run instead of an export")
    ] = False,
    engine: Annotated[str | None, typer.Option(help="vllm, sglang, hf; by default engine.name")] = None,
    host: Annotated[
        str | None, typer.Option(help="address to serve on; 127.0.0.1 by default, others need a key")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port to serve on; by default any")] = 0,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="serve this PEFT adapter as model NAME; may be repeated"),
    ] = None,
    key_file: Annotated[str, typer.Option(metavar="FILE", help="has the API key that clients send")] = "",
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="override a setting; may be repeated")
    ] = None,
) -> None:
    """Serve a model, or the versions of a run, to clients of the OpenAI API, until Ctrl-C."""
    import asyncio

    from services.runtime.errors import configure_logging
    from services.runtime.event_loop import run_loop
    from services.serving.service import serve_until_signal
    from services.serving.source import serving_of, with_adapters
    from services.settings.sources import to_toml

    configure_logging("serve")
    given = {
        "engine.name": engine,
        "environment.host": host,
        "environment.port": port,
        "environment.ports": 1,
    }
    flags = [f"{name}={to_toml(value)}" for name, value in given.items() if value is not None]
    found = with_adapters(serving_of(source, [*flags, *(set_ or [])], follow), adapter or [])
    serving = dataclasses.replace(found, key_file=key_file)
    try:
        run_loop(serve_until_signal(serving, _announce))
    except asyncio.CancelledError:  # by a second signal
        raise typer.Exit(1) from None


def _announce(url: str) -> None:
    print(f"serving {url}  (Ctrl-C ends it)", flush=True)
