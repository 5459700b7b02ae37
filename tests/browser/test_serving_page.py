"""The page of a service in a headless Chromium: figures that move, and a request by its form."""

import shutil

import pytest

from tests.browser.chromium import Browser
from tests.multiprocess.test_serve import load, make_version, service, wait_for_more

pytestmark = [
    pytest.mark.skipif(shutil.which("chromium") is None, reason="tests/browser/setup.sh"),
    pytest.mark.timeout(300),
]


def test_the_page_shows_versions_rates_and_answers(tmp_path):
    version = 1795895140932290001  # of nanoseconds, which no float holds
    make_version(tmp_path / "m", version)
    with service(tmp_path, replicas=2) as running, Browser(tmp_path / "profile") as browser:
        browser.open(f"http://{running.rest[0]}:{running.rest[1]}/")
        figure = (
            "((name) => [...document.querySelectorAll('dl div')].find((one) =>"
            " one.firstChild.textContent === name)?.lastChild.textContent)"
        )
        with load(running) as outcomes:
            wait_for_more(outcomes)
            browser.wait_for(f"parseFloat({figure}('requests/s')) > 10")
            browser.wait_for(f"parseFloat({figure}('mean latency')) > 0")
            browser.wait_for(f"parseFloat({figure}('requests in a batch')) >= 1")
        assert browser.run(f"{figure}('version')") == str(version)
        assert browser.run(f"{figure}('replicas')") == "2"
        rows = "[...document.querySelectorAll('tbody td')].map((one) => one.textContent)"
        assert browser.run(rows) == [str(version), "AVAILABLE", ""]
        made = '{"instances":[[0.5,0.5]]}'
        assert browser.run("document.querySelector('textarea').value") == made
        browser.run("document.querySelector('textarea').value = '{\"instances\": [[7, 8]]}'")
        browser.run("document.querySelector('form').requestSubmit()")
        browser.wait_for("document.querySelector('pre').textContent.includes('[[7, 8]]')")
        assert browser.run("document.querySelector('output').textContent").startswith("200, ")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert not browser.console, browser.console


def test_a_token_is_asked_for(tmp_path):
    make_version(tmp_path / "m", 1)
    (tmp_path / "token").write_text("secret\n")
    options = {"replicas": 1, "token": str(tmp_path / "token")}
    with service(tmp_path, **options) as running, Browser(tmp_path / "profile") as browser:
        browser.open(f"http://{running.rest[0]}:{running.rest[1]}/")
        browser.wait_for("document.getElementById('problem').textContent.includes('token')")
        browser.run("document.getElementById('token').value = 'secret'")
        browser.wait_for("document.querySelector('h2')?.textContent === 'm'")
        browser.wait_for("document.querySelector('tbody td')?.textContent === '1'")
