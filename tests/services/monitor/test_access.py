"""Who may read the page: everybody on loopback by a loopback name, elsewhere those who have the key."""

from pathlib import Path

import aiohttp

from services.monitor.access import page_url
from services.run_files.page_key import KEY_FILE
from tests.services.monitor.runs import monitored, offline_settings, recorded_run

GUARDED = (
    "",
    "status.json",
    "steps.json",
    "events.json",
    "versions.json",
    "evaluations.json",
    "samples.json",
    "targets.json",
    "metrics",
)
OPEN = ("health", "assets/main.js")


async def get(url: str, **options: object) -> tuple[int, dict[str, str], str]:
    async with aiohttp.ClientSession() as session, session.get(url, **options) as answer:  # type: ignore[arg-type]
        return answer.status, dict(answer.headers), await answer.text()


def test_url_quotes_the_key() -> None:
    assert page_url("::1", 80, "") == "http://[::1]/"
    assert page_url("0.0.0.0", 81, "") == "http://127.0.0.1:81/"
    assert page_url("10.0.0.1", 8080, "a&b") == "http://10.0.0.1:8080/?key=a%26b"


async def test_page_with_a_key_answers_only_with_it(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    key_file = tmp_path / "key"
    key_file.write_text("correct-horse-battery-staple\n")
    key_file.chmod(0o600)
    async with monitored(offline_settings(run_dir, f"monitor.key_file={key_file}")) as url:
        base, _, query = url.partition("?")
        assert query == "key=correct-horse-battery-staple"
        for path in GUARDED:
            assert (await get(base + path))[0] == 401
            assert (await get(base + path + "?key=correct-horse-battery-stapl"))[0] == 401
            assert (await get(base + path, headers={"Authorization": "Bearer wrong"}))[0] == 401
            assert (await get(f"{base}{path}?{query}"))[0] == 200
            bearer = {"Authorization": "Bearer correct-horse-battery-staple"}
            assert (await get(base + path, headers=bearer))[0] == 200
        for path in OPEN:
            assert (await get(base + path))[0] == 200


async def test_page_off_loopback_has_a_key(tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    async with monitored(offline_settings(run_dir, "monitor.host=0.0.0.0")) as url:
        assert f"?key={(run_dir / KEY_FILE).read_text().strip()}" in url
        assert (await get(url))[0] == 200
        assert (await get(url.partition("?")[0]))[0] == 401


async def test_foreign_host_name_is_refused_on_loopback(tmp_path: Path) -> None:
    async with monitored(offline_settings(recorded_run(tmp_path))) as url:
        for path in GUARDED:
            assert (await get(url + path, headers={"Host": "evil.example:80"}))[0] == 403
        for host in ("localhost", "127.0.0.1:1234", "[::1]:80"):
            assert (await get(url, headers={"Host": host}))[0] == 200


async def test_page_is_read_only_and_its_headers_are_strict(tmp_path: Path) -> None:
    async with monitored(offline_settings(recorded_run(tmp_path))) as url:
        async with aiohttp.ClientSession() as session:
            for path in GUARDED + OPEN:
                for method in ("POST", "PUT", "DELETE", "PATCH"):
                    async with session.request(method, url + path) as answer:
                        assert answer.status == 405
        for path in (*GUARDED, *OPEN, "missing", "assets/../service.py", "assets/missing.js"):
            _, headers, _ = await get(url + path)
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] in ("no-store", "no-cache")
