"""A page to label commits on: one commit at a time, its message and diff, and a choice of words; then how labellers agree.

It listens on this machine alone, and every address has a token in it. It has no scripts, fetches nothing, and what a commit says is
shown as text. A label is in the CSV file as soon as it is given; whoever goes on later begins with the first that is missing.
"""

import fcntl
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from soli.bugs import labels
from soli.bugs.catalogue import mechanisms
from soli.bugs.labels import FIX, Label
from soli.bugs.taxonomy import DIMENSIONS
from soli.core.errors import SoliError, blaming
from soli.core.page import template

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
}  # fmt: skip
LONGEST = 100_000  # bytes of a form


@dataclass(frozen=True)
class Item:
    """A commit to label, and how it is shown."""

    repo: str
    commit: str
    sample: str
    subject: str
    body: str
    diff: str


def application(items: Sequence[Item], path: Path, labeller: str, token: str) -> Starlette:
    """The page of one labeller: `path` holds everybody's labels, and is written after each."""
    root = f"/{token}"
    words = {"dimensions": DIMENSIONS, "fix_words": FIX, "mechanisms": mechanisms()}
    pages = template(__package__, "label_page.html", root=root, labeller=labeller, **words)

    def known() -> list[Label]:
        return labels.read(path) if path.exists() else []

    def mine(rows: Sequence[Label]) -> dict[tuple[str, str], Label]:
        return labels.by_labeller(rows).get(labeller, {})

    def page(name: str, status: int = 200, **said: Any) -> Response:
        return HTMLResponse(pages.render(said, page=name), status, HEADERS)

    def start(request: Request) -> Response:
        done = mine(known())
        left = [i for i, one in enumerate(items) if (one.repo, one.commit) not in done]
        return RedirectResponse(f"{root}/{left[0]}" if left else f"{root}/agreement", 303, HEADERS)

    async def commit(request: Request) -> Response:
        number = request.path_params["number"]
        if not 0 <= number < len(items):
            return page("none", 404)
        item = items[number]
        told = mine(known()).get((item.repo, item.commit))
        wrong: list[tuple[str, str]] = []
        if request.method == "POST":
            form = await _form(request)
            told = given(form or {}, item, labeller)
            wrong = labels.wrong(told) if form is not None else [("this is more than a form holds", "")]
            if not wrong:
                keep(path, told)
                return RedirectResponse(f"{root}/", 303, HEADERS)
        done = len({(one.repo, one.commit) for one in items} & set(mine(known())))
        return page("commit", 422 if wrong else 200, number=number, count=len(items), done=done, item=item, told=told, wrong=wrong)

    def agreement(request: Request) -> Response:
        rows = known()
        places = {(one.repo, one.commit): i for i, one in enumerate(items)}
        left = len(items) - len(set(places) & set(mine(rows)))
        return page("agreement", pairs=labels.pairs(rows) if rows else [], left=left, places=places)

    def broken(request: Request, error: Exception) -> Response:
        return page("broken", 500, problem=str(error))

    one = Route(f"{root}/{{number:int}}", commit, methods=["GET", "POST"])
    routes = [Route(f"{root}/", start), Route(f"{root}/agreement", agreement), one]
    return Starlette(routes=routes, exception_handlers={SoliError: broken})  # labels that another has damaged meanwhile


def serve(items: Sequence[Item], path: Path, labeller: str, port: int) -> None:
    """Until it is interrupted."""
    import socket

    import uvicorn

    token = secrets.token_urlsafe(24)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with blaming(lambda error: SoliError("this port cannot be had", got=f"{port}: {error.strerror}", fix="--port 0: any that is free"), OSError):
            listening.bind(("127.0.0.1", port))
        listening.listen()
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/{token}/", flush=True)
        print(f"{len(items)} commits; labels go to {path}. Ctrl-C ends it.", flush=True)
        app = application(items, path, labeller, token)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])


def given(form: Mapping[str, str], item: Item, labeller: str) -> Label:
    """What a form says, which a person has filled in. Words of no fix are left out."""
    fix = form.get("fix", "")
    of = (item.repo, item.commit, item.sample, labeller, "a person", date.today().isoformat(), fix)
    words = {name: form.get(name, "") if fix == "yes" else "" for name in (*DIMENSIONS, "mechanism")}
    return Label(*of, **words, why=" ".join(form.get("why", "").split()))


def keep(path: Path, told: Label) -> None:
    """Put a label into the file, in place of an earlier one of the same. Other labellers' pages may do so at the same time."""
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = labels.read(path) if path.exists() else []
        kept = [one for one in known if (one.repo, one.commit, one.labeller) != (told.repo, told.commit, told.labeller)]
        labels.write(path, [*kept, told])


async def _form(request: Request) -> dict[str, str] | None:
    """What was filled in; None where it is longer than any form."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LONGEST:
            return None
    return {name: values[-1] for name, values in parse_qs(body.decode(errors="replace")).items()}
