"""``GET /pd``: the status page. Three files of this package, which hold no data of the node's.

The page reads ``/pd/status`` and ``/pd/requests``; with --api-key it asks for the key first.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.responses import Response

FILES = {
    "/pd": ("index.html", "text/html"),
    "/pd/page.css": ("page.css", "text/css"),
    "/pd/page.js": ("page.js", "text/javascript"),
}
HEADERS = {
    # Whatever slipped into the page's text could still load and run nothing.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _read(name: str) -> bytes:
    return files("pdnode").joinpath("page_files", name).read_bytes()


def answer(path: str) -> Response:
    name, media_type = FILES.get(path, FILES["/pd"])
    return Response(_read(name), media_type=media_type, headers=HEADERS)
