"""`soli bugs label` in a real browser: Debian's chromium, driven by selenium, against the real server."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from soli.bugs.label_page import keep
from soli.bugs.labels import Label, read
from soli.bugs.mine import mine
from test_bugs_labels import ONE
from test_bugs_mine import commit, git
from typed import soli

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
browser_only = pytest.mark.skipif(
    not (CHROMIUM and DRIVER) and not os.environ.get("SOLI_TEST_BROWSER"),
    reason="no chromium and chromedriver here: apt install chromium chromium-driver (SOLI_TEST_BROWSER=1 makes this a failure)",
)
HOSTILE = "Fix <script>document.title='owned'</script> & \"quotes\""


@pytest.fixture
def mined(tmp_path: Path) -> tuple[Path, Path]:
    repo = tmp_path / "owner+name"
    repo.mkdir()
    git(repo, "init", "-q", "-b", "main")
    commit(repo, "Begin", {"a.py": "x = 1\n"})
    commit(repo, f"{HOSTILE}\n\nIts body.", {"a.py": "x = '<b>2</b>'\n"})
    commit(repo, "Fix a hang", {"a.py": "x = 3\n"})
    mine([repo], tmp_path / "bugs.db")
    return repo, tmp_path


@contextmanager
def served(repo: Path, folder: Path, who: str) -> Iterator[str]:
    """The page's address while it is served."""
    command = [
        sys.executable, "-m", "soli.cli.main", "bugs", "label", str(repo), "--labeller", who, "--db", str(folder / "bugs.db"),
        "--labels", str(folder / "labels.csv"), "--sample", str(folder / "sample.json"), "--fixes", "2", "--seed", "1",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        drawn_before = (folder / "sample.json").exists()
        line = process.stdout.readline().strip()
        if drawn_before:
            assert "draw into another --sample" in line
            line = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{30,}/", line), (line, process.stderr)
        try:
            yield line
        finally:
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=20)
    assert "Traceback" not in out + error


@contextmanager
def browser(folder: Path) -> Iterator:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000"):  # fmt: skip
        options.add_argument(word)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    driver.implicitly_wait(10)
    try:
        yield driver
    finally:
        driver.quit()


def label(driver, **words: str) -> None:
    """Choose these words and keep them."""
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.expected_conditions import staleness_of
    from selenium.webdriver.support.ui import WebDriverWait

    why = words.pop("why", "")
    for name, word in words.items():
        driver.find_element(By.CSS_SELECTOR, f'input[name="{name}"][value="{word}"]').click()
    driver.find_element(By.NAME, "why").clear()
    driver.find_element(By.NAME, "why").send_keys(why)
    page = driver.find_element(By.TAG_NAME, "html")
    driver.find_element(By.TAG_NAME, "button").click()
    # Asked at the moment when the page goes, chromedriver says "unknown error", and only then that it is stale.
    WebDriverWait(driver, 10, ignored_exceptions=[WebDriverException]).until(staleness_of(page))


CRASH = {"fix": "yes", "symptom": "crash", "cause": "API misuse", "strategy": "call", "stage": "training"}


@browser_only
def test_two_people_label_and_see_where_they_differ(mined: tuple[Path, Path]) -> None:
    from selenium.webdriver.common.by import By

    repo, folder = mined
    with browser(folder) as driver:
        text = lambda: driver.find_element(By.TAG_NAME, "body").text
        with served(repo, folder, "Ann") as address:
            driver.get(address)
            assert "commit 1 of 2, 0 labelled" in text()
            first = driver.find_element(By.TAG_NAME, "h1").text
            label(driver, fix="yes", symptom="crash", why="first try")
            assert "'cause' says none of" in text()  # what is missing is said, and what was chosen stays
            assert driver.find_element(By.CSS_SELECTOR, 'input[name="symptom"][value="crash"]').is_selected()
            assert not (folder / "labels.csv").exists()
            label(driver, **CRASH, why='it "says" so, <b>here</b>')
            assert "commit 2 of 2, 1 labelled" in text()
            second = driver.find_element(By.TAG_NAME, "h1").text
            assert {first, second} == {HOSTILE, "Fix a hang"}  # as text: nothing of it ran
            assert driver.title == "soli: labels by Ann"
            label(driver, fix="no")
            assert "All commits have a label of Ann" in text()
            assert "There is one labeller so far" in text()
        rows = read(folder / "labels.csv")
        assert [(one.labeller, one.fix, one.symptom, one.made_by) for one in rows if one.fix == "yes"] == [("Ann", "yes", "crash", "a person")]  # fmt: skip
        assert [one.why for one in rows if one.fix == "yes"] == ['it "says" so, <b>here</b>']
        with served(repo, folder, "Bob") as address:
            driver.get(address)
            assert driver.find_element(By.TAG_NAME, "h1").text == first  # the same commits in the same order
            assert not driver.find_elements(By.CSS_SELECTOR, "input:checked")  # and nothing of what Ann said
            label(driver, **{**CRASH, "symptom": "hang"})
            label(driver, fix="no")
            assert "Ann and Bob" in text()
            assert "1 labelled differently" in text()
            assert re.search(r"symptom\s+crash\s+hang", text())
            driver.find_element(By.CSS_SELECTOR, "td a").click()
            label(driver, symptom="crash")  # Bob thinks again
            assert "0 labelled differently" in text()
            driver.save_screenshot(str(folder / "agreement.png"))
    rows = read(folder / "labels.csv")
    assert len(rows) == 4
    assert {one.symptom for one in rows if one.fix == "yes"} == {"crash"}


def test_labels_of_several_people_at_once_are_all_kept(tmp_path: Path) -> None:
    """Each page writes the whole file: four processes, ten labels each."""
    path = tmp_path / "labels.csv"
    ones = [[replace(ONE, labeller=who, commit=f"{i:040d}") for i in range(10)] for who in "ABCD"]
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(kept, [path] * 4, ones))
    assert len(read(path)) == 40


def kept(path: Path, labels: list[Label]) -> None:
    for one in labels:
        keep(path, one)


def status(url: str, body: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body), timeout=10) as answer:
            return answer.status, answer.headers["Content-Security-Policy"] or ""
    except urllib.error.HTTPError as error:
        return error.code, ""


def read_page(url: str, body: bytes | None = None) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body), timeout=10)
    return caught.value.code, caught.value.read().decode()


def test_the_page_is_closed_to_whoever_lacks_its_token(mined: tuple[Path, Path]) -> None:
    repo, folder = mined
    with served(repo, folder, "Ann") as address:
        host = address.split("/")[2]
        assert status(f"http://{host}/")[0] == 404
        assert status(f"http://{host}/0")[0] == 404
        assert status(f"http://{host}/{'x' * 32}/0", b"fix=no")[0] == 404
        code, policy = status(f"{address}0")
        assert code == 200
        assert "default-src 'none'" in policy
        assert status(f"{address}7")[0] == 404
        assert status(f"{address}0", b"fix=perhaps")[0] == 422
        assert status(f"{address}0", b"fix=no&why=" + b"x" * 200_000)[0] == 422
        assert not (folder / "labels.csv").exists()
        assert status(f"{address}0", b"fix=no")[0] == 200
        kept = (folder / "labels.csv").read_bytes()
        (folder / "labels.csv").write_bytes(kept.replace(b",no,", b",<b>,"))
        for form in (None, b"fix=no"):  # it is told what is wrong, and stays
            code, told = read_page(f"{address}0", form)
            assert code == 500
            assert "line 2: &#39;fix&#39; says none of yes, no, unsure" in told
        assert b"<b>" in (folder / "labels.csv").read_bytes()
        (folder / "labels.csv").write_bytes(kept)
    assert len(read(folder / "labels.csv")) == 1
    drawn = json.loads((folder / "sample.json").read_text())
    assert drawn["population"] == {"fix": 2, "rest": 1}
    assert len(drawn["commits"]["fix"]) == 2


def test_what_cannot_be_labelled_is_said(mined: tuple[Path, Path]) -> None:
    repo, folder = mined
    known = ("--labeller", "Ann", "--db", str(folder / "bugs.db"), "--sample", str(folder / "s.json"))
    run = lambda *more: soli("bugs", "label", str(repo), *known, *more)
    assert "not so many commits to draw from (fix)" in run("--fixes", "3").stderr
    assert not (folder / "s.json").exists()
    (folder / "s.json").write_text("{}")
    assert "holds no commits that were drawn" in run().stderr
