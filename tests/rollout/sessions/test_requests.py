"""Tests which sampling parameters a request may have, by the clients that people use."""

import aiohttp
import openai
import pytest

from rollout.engines.base import Sampling
from tests.rollout.sessions.serving import USER, served


async def test_sampling_parameters_of_the_run_are_accepted_and_others_are_refused_by_name() -> None:
    async with served(sampling=Sampling(max_tokens=8, temperature=0.7)) as (client, session, endpoint, key):
        same = {"temperature": 0.7, "top_p": 1.0, "presence_penalty": 0, "logit_bias": {}}
        await client.chat.completions.create(model="m", messages=[USER], **same, extra_body={"top_k": -1})
        await client.completions.create(model="m", prompt="a", temperature=0.7)
        await client.responses.create(model="m", input="a", temperature=0.7, top_p=1)
        assert session.overridden == 0
        for name, value in (("temperature", 1.0), ("top_p", 0.9), ("seed", 7), ("frequency_penalty", 0.1)):
            with pytest.raises(openai.BadRequestError, match=f"{name} would change the distribution"):
                await client.chat.completions.create(model="m", messages=[USER], **{name: value})
        async with aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": [USER], "top_p": True}
            async with http.post(endpoint.url(key) + "/chat/completions", json=body) as response:
                assert response.status == 400


async def test_sampling_parameters_may_be_left_to_the_run() -> None:
    async with served(override=True) as (client, session, _, _):
        raw = await client.chat.completions.with_raw_response.create(
            model="m", messages=[USER], temperature=0.0, seed=7
        )
        assert raw.headers["x-tether-not-applied"] == "seed, temperature"
        assert session.overridden == 1
