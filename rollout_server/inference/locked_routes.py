"""A middleware of every vLLM server that a node starts: vLLM's own key guards /v1 and few routes beside it.

Without a key, others could sample (/invocations), count tokens, pause the engine and, if a server can sleep, run any
method of a worker.
"""

from __future__ import annotations

import hmac
import os

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_ROUTES = ("/health", "/metrics", "/version")


class NeedsKey:
    """Answers 401 to requests without the server's key (``VLLM_API_KEY``), except on :data:`OPEN_ROUTES`.

    This is plain ASGI, so vLLM still notices when a client disconnects, and aborts the client's request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_ROUTES:
            header = Headers(scope=scope).get("authorization", "").encode()
            if not hmac.compare_digest(header, self._expected):
                return await JSONResponse({"error": "missing or wrong key"}, 401)(scope, receive, send)
        await self._app(scope, receive, send)
