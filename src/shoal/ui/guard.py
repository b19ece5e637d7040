"""Who may talk to the server: a browser on this machine, from its own pages.

Any web page can make a browser send requests to 127.0.0.1, and a domain can be made to resolve to it (DNS rebinding).
So a request must name this server as its host, and if it says where it comes from, come from here.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
NAMES = ("127.0.0.1", "localhost")


class Guard:
    """Middleware that refuses other hosts, other origins and all methods that could change something."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == 80 else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        status, reason = self._refusal(scope)
        answer = self.app if status == 200 else PlainTextResponse(reason + "\n", status)
        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        headers = Headers(scope=scope)
        if headers.get("host", "").lower() not in self.hosts:
            return 421, "This server answers to 127.0.0.1 and localhost only."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This server only shows: nothing can be sent to it."
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return 403, "Pages of other origins may not read from this server."
        # A link from elsewhere may open a page. Its scripts, frames and images may not.
        site, mode = headers.get("sec-fetch-site", "none"), headers.get("sec-fetch-mode", "navigate")
        if site not in ("none", "same-origin") and mode != "navigate":
            return 403, "Pages of other origins may not read from this server."
        return 200, ""
