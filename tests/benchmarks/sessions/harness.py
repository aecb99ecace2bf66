"""Plays harnesses in a process of its own: each session has a connection, and sends its history every time.

Reads a line of JSON for each round: {"sessions": [{"number", "host", "port", "path"}], those that are open;
"callers", numbers of those that call; "turns", calls of each; "at_once"}. Answers with a line: {"ms": [[turn,
milliseconds]...], "seconds", "cpu_s"}. HTTP is written by hand, so that the client costs little.
"""

import asyncio
import json
import sys
import time
from typing import Any

import uvloop

from tests.benchmarks.sessions.dialogue import TOOLS, following, opening


class Player:
    """One session, with its connection and its history."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._messages = opening(given["number"])
        self._turn = 0
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self) -> tuple[int, float]:
        """Make the next call; returns its turn, counted from 1, and how long its answer took, ms.

        The first one opens the session's connection, which stays open: the endpoint closes a connection that
        sends nothing at first, and thousands of calls are made one after another.
        """
        if self._connection is None:
            self._connection = await asyncio.open_connection(self._given["host"], self._given["port"])
        reader, writer = self._connection
        body = json.dumps({"model": "policy", "messages": self._messages, "tools": TOOLS}).encode()
        head = (
            f"POST {self._given['path']}/chat/completions HTTP/1.1\r\nHost: {self._given['host']}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        answer = await reader.readexactly(length)
        ms = (time.perf_counter() - began) * 1e3
        if " 200 " not in lines[0]:
            raise RuntimeError(f"{lines[0]}: {answer[:500]!r}")
        said = json.loads(answer)["choices"][0]["message"]["content"]
        self._turn += 1
        self._messages += following(said or "", self._turn)
        return self._turn, ms

    def close(self) -> None:
        """Close the connection, if a call has opened it."""
        if self._connection is not None:
            self._connection[1].close()


async def play(players: list[Player], turns: int, at_once: int) -> dict[str, Any]:
    """Make `turns` calls of each session, turn by turn, at most `at_once` at a time."""
    found: list[tuple[int, float]] = []

    async def play_share(share: list[Player]) -> None:
        for _ in range(turns):
            for player in share:
                found.append(await player.call())

    began, cpu_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for first in range(at_once):
            tasks.create_task(play_share(players[first::at_once]), name=f"share-{first}")
    return {"ms": found, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}


async def main() -> None:
    """Play one round for each line of the standard input."""
    players: dict[int, Player] = {}
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        given = {session["number"]: session for session in asked["sessions"]}
        for number in players.keys() - given.keys():
            players.pop(number).close()
        for number in given.keys() - players.keys():
            players[number] = Player(given[number])
        callers = [players[number] for number in asked["callers"]]
        print(json.dumps(await play(callers, asked["turns"], asked["at_once"])), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
