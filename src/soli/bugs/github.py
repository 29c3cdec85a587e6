"""Merged pull requests and the issues that they close, from GitHub's API: what a git history does not say.

The file is JSON, a line each: what it is of; pull requests as they come; after each page where the next one begins, so that
an export that was interrupted goes on there. A token is sent to the API alone, and over nothing but https or this machine.
"""

import json
import re
import sqlite3
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from http.client import HTTPException
from importlib.resources import files
from pathlib import Path
from typing import Any

from soli.bugs import store
from soli.bugs.endpoint import private
from soli.core.errors import SoliError, blaming, failure
from soli.core.files import write_whole
from soli.core.progress import busy

API = "https://api.github.com/graphql"
PAGE = 50
TRIES = 5
HOUR = 3600  # seconds: GitHub counts requests by the hour
LONG = 200  # characters of an answer that are shown
AGAIN = "the same command later goes on from here"
FIELDS = {"labels": "name", "reviews": "author { login }"}
"""Of the lists that requests and issues have, each in pages of its own."""


def _list(name: str, first: int, after: str = "") -> str:
    return f"{name}(first: {first}{after}) {{ pageInfo {{ hasNextPage endCursor }} nodes {{ {FIELDS[name]} }} }}"


FIELDS["closingIssuesReferences"] = f"__typename id number title bodyText createdAt closedAt {_list('labels', 20)}"
FIRST = {"labels": 20, "reviews": 50, "closingIssuesReferences": 10}
"""How long the first page of each is."""
_WRITTEN = files(__package__).joinpath("requests.graphql").read_text(encoding="utf-8")
QUERY = _WRITTEN % {name: _list(name, first) for name, first in FIRST.items()}
REQUEST = {"number", "hash", "title", "labels", "opened", "merged", "reviewers", "closes"}
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
"""A query and its variables; what GitHub answers."""


def export(repo: str, out: Path, token: str, api: str = API, pause: float = 1.0) -> int:
    """All merged pull requests of owner/name into `out`; how many there are. It goes on where an earlier export stopped."""
    owner, _, name = repo.partition("/")
    if not owner or not name or "/" in name:
        raise SoliError("a repository is owner/name", got=repo, allowed="such as deepspeedai/DeepSpeed")
    if not re.fullmatch("[!-~]+", token := token.strip()):  # what it is, is not printed
        got, fix = "one with other signs in it" if token else "none", "GITHUB_TOKEN=... (a personal access token that may read public repositories)"
        raise SoliError("GitHub asks for a token", got=got, allowed="letters, digits and signs of ASCII", fix=fix)
    private(api, "a token")
    with blaming(lambda error: SoliError("this file is no export of GitHub's, or is damaged", got=f"{out}: {error}", fix="another --out")):
        after, count = _begun(out, repo)
    if not out.parent.is_dir():
        raise SoliError("there is no such folder", got=out.parent, fix="another --out")
    ask: Ask = lambda query, variables: _asked(api, token, query, variables, pause)
    with out.open("a", encoding="utf-8") as file, busy(f"exporting {repo}", unit="requests") as add:
        if not out.stat().st_size:
            file.write(json.dumps({"repo": repo, "format": 1}) + "\n")
        while True:
            nodes, end, more = _page({"owner": owner, "name": name, "after": after, "count": PAGE}, ask)
            after = end or after  # a page without requests has no end
            # a page is whole or not there: its end is written with it
            file.write("".join(json.dumps(one) + "\n" for one in [*nodes, {"cursor": after}]))
            file.flush()
            count += len(nodes)
            add(len(nodes))
            if not more:
                return count


def load(mined: Path, exported: Path) -> tuple[str, int, int]:
    """Into what `soli bugs mine` made: the repository, requests of which it has the commit, and all."""
    lines = _lines(exported)
    requests = [one for one in lines[1:] if "number" in one]
    with store.opened(mined) as base:
        repo = _called(base, lines[0]["repo"])
        numbers = dict(base.execute("SELECT pull, hash FROM change WHERE repo = ? AND pull IS NOT NULL", (repo,)))
        hashes = set(store.column(base, "SELECT hash FROM change WHERE repo = ?", repo))
        found = [one["hash"] if one["hash"] in hashes else numbers.get(one["number"]) for one in requests]
        for one, hash_ in zip(requests, found, strict=True):
            said = (one["title"], json.dumps(one["labels"]), one["opened"], one["merged"], one["reviewers"])
            store.put(base, "request", repo, one["number"], hash_, *said)
            for issue in one["closes"]:
                said = (issue["title"], issue["body"], json.dumps(issue["labels"]), issue["opened"], issue["ended"])
                store.put(base, "issue", repo, issue["number"], *said)
                if hash_ is not None:
                    store.put(base, "closed", repo, hash_, issue["number"], "github", known="IGNORE")
    return repo, sum(hash_ is not None for hash_ in found), len(requests)


def _called(base: sqlite3.Connection, repo: str) -> str:
    """What the history of owner/name is called there: so, or by its folder alone. SoliError where it was not mined."""
    known = store.column(base, "SELECT repo FROM history")
    found = next((name for name in (repo, repo.partition("/")[2]) if name in known), None)
    if found is None:
        got = f"{repo} (it has {', '.join(sorted(known))})"
        raise SoliError("this is an export of a history that was not mined into this file", got=got, fix="mine its clone too, in a folder of the repository's name")
    return found


@blaming(lambda error: failure("GitHub's answer is not what it should be", got=f"{type(error).__name__}: {error}"[:LONG], fix=AGAIN))
def _page(of: dict[str, Any], ask: Ask) -> tuple[list[dict[str, Any]], str | None, bool]:
    """Requests, where they end, and whether there are more. An error where something of them is lacking, or is another thing."""
    page = ask(QUERY, of)["repository"]["pullRequests"]
    return [_request(node, ask) for node in page["nodes"]], page["pageInfo"]["endCursor"], page["pageInfo"]["hasNextPage"]


def _request(node: dict[str, Any], ask: Ask) -> dict[str, Any]:
    authors = {review["author"]["login"] for review in _whole(node, "reviews", ask) if review["author"]}
    closes = [
        {"number": one["number"], "title": one["title"], "body": one["bodyText"], "labels": _labels(one, ask),
         "opened": _seconds(one["createdAt"]), "ended": _seconds(one["closedAt"]) if one["closedAt"] else None}
        for one in _whole(node, "closingIssuesReferences", ask)
    ]  # fmt: skip
    return {
        "number": node["number"], "hash": (node["mergeCommit"] or {}).get("oid"), "title": node["title"], "labels": _labels(node, ask),
        "opened": _seconds(node["createdAt"]), "merged": _seconds(node["mergedAt"]), "reviewers": len(authors), "closes": closes,
    }  # fmt: skip


def _labels(node: dict[str, Any], ask: Ask) -> list[str]:
    return [label["name"] for label in _whole(node, "labels", ask)]


def _whole(node: dict[str, Any], name: str, ask: Ask) -> list[dict[str, Any]]:
    """A list of a request or an issue: its first page came with that, the others are asked for."""
    part = node[name]
    found = list(part["nodes"])
    more = f"... on {node['__typename']} {{ {_list(name, 50, ', after: $after')} }}"
    while part["pageInfo"]["hasNextPage"]:
        of = {"id": node["id"], "after": part["pageInfo"]["endCursor"]}
        part = ask(f"query($id: ID!, $after: String) {{ node(id: $id) {{ {more} }} }}", of)["node"][name]
        found += part["nodes"]
    return found


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


def _begun(out: Path, repo: str) -> tuple[str | None, int]:
    """Where an earlier export of the same repository stopped, and how many requests it has. A page that was cut off is taken away."""
    if not out.exists():
        return None, 0
    text = out.read_text(encoding="utf-8")
    if text and not text.startswith('{"repo": '):
        raise SoliError("this file is no export of GitHub's", got=out, fix="another --out")
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if (held := json.loads(lines[0])["repo"] if lines else repo) != repo:
        raise SoliError("this file holds another repository", got=f"{out}: {held}", fix="another --out")
    ends = [i for i, line in enumerate(lines) if line.startswith('{"cursor": "')]
    kept = lines[: ends[-1] + 1 if ends else 1]
    write_whole(out, "".join(kept))
    return json.loads(kept[-1])["cursor"] if ends else None, sum(line.startswith('{"number": ') for line in kept)


def _lines(path: Path) -> list[dict[str, Any]]:
    fix = "soli bugs export OWNER/NAME --out FILE goes on with it"
    with blaming(lambda error: SoliError("this is no export of GitHub's", got=f"{path}: {error}", fix=fix), OSError, ValueError):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no object")
        if not lines or lines[0].get("format") != 1 or "repo" not in lines[0] or "cursor" not in lines[-1]:
            raise ValueError("it does not begin and end as an export does: was it interrupted?")
        if lacking := [i for i, line in enumerate(lines, 1) if "number" in line and not set(line) >= REQUEST]:
            raise ValueError(f"line {lacking[0]} is no whole request")
        return lines


def _asked(api: str, token: str, query: str, variables: dict[str, Any], pause: float) -> dict[str, Any]:
    """What it answers. What GitHub refuses for now is asked again; what it refuses is a SoliError."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    headers = {"Authorization": f"bearer {token}", "Content-Type": "application/json", "User-Agent": "soli"}
    said = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2**attempt)
        try:
            with _OPENER.open(urllib.request.Request(api, body, headers), timeout=60) as answer:
                told, sent = json.loads(answer.read()), answer.headers
        except urllib.error.HTTPError as error:
            said = f"{error.code} {error.reason} {error.read(LONG).decode(errors='replace')}".strip()
            if error.code == 401:
                raise SoliError("GitHub does not take this token", got=said, fix="GITHUB_TOKEN=... that is valid") from error
            if error.code < 500 and error.code not in (403, 429):
                raise failure("GitHub refused the request", got=said) from error
            _wait(error.headers)
            continue
        except (OSError, HTTPException, ValueError, RecursionError) as error:
            said = str(error) or type(error).__name__
            continue
        errors = told.get("errors") if isinstance(told, dict) else None
        each = errors if isinstance(errors, list) else [errors]
        errors = [one if isinstance(one, dict) else {"message": one} for one in each if one]
        if any(one.get("type") == "RATE_LIMITED" for one in errors):
            said = _messages(errors)
            _wait(sent)
            continue
        data = None if errors or not isinstance(told, dict) else told.get("data")
        if not isinstance(data, dict) or None in data.values():
            raise failure("GitHub refused the request", got=_messages(errors) if errors else repr(told)[:LONG])
        return data
    raise failure("GitHub does not answer", got=f"{said}, {TRIES} times", fix=AGAIN)


def _messages(errors: list[dict[str, Any]]) -> str:
    return "; ".join(str(one.get("message")) for one in errors)


def _wait(headers: Any) -> None:
    """As long as GitHub says, before it answers again."""
    wait, reset = headers.get("Retry-After") or "", headers.get("X-RateLimit-Reset") or ""
    if not wait.isdigit() and reset.isdigit() and headers.get("X-RateLimit-Remaining") == "0":
        wait = str(max(int(reset) - int(time.time()) + 1, 0))
    if wait.isdigit():
        time.sleep(min(int(wait), HOUR))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Where an answer points elsewhere the token would go there too."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
