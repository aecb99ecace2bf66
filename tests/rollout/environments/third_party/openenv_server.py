"""Serves a guessing game by the package `openenv-core`, at a free port, which it prints."""

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""


class Game(Environment[Guess, Told, State]):
    """The number is the seed; each guess says which way it lies."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Told:
        self.hidden = seed or 0
        return Told(text=f"? {self.hidden % 2}")

    def step(self, action: Guess, timeout_s: float | None = None) -> Told:
        if action.message == "end":
            raise RuntimeError("broken")
        if action.message == str(self.hidden):
            return Told(text="right", done=True, reward=1.0)
        return Told(text="up" if action.message < str(self.hidden) else "down", reward=-0.25)

    @property
    def state(self) -> State:
        return State()


uvicorn.run(create_fastapi_app(Game, Guess, Told, max_concurrent_envs=4), port=0)
