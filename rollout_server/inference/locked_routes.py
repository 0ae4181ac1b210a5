"""A middleware of a vLLM server that can sleep: vLLM's own key guards few routes, and not those for developers.

They are served together with the routes for sleeping, and run any method of a worker for whoever reaches the port.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

OPEN = ("/health", "/metrics", "/version")


async def needs_key(request: Request, answer: Callable[[Request], Awaitable[Any]]) -> Response:
    """Answer 401 on every route but :data:`OPEN` to a request without the server's key (``VLLM_API_KEY``)."""
    given = request.headers.get("authorization", "").encode()
    if request.url.path in OPEN or hmac.compare_digest(given, f"Bearer {os.environ['VLLM_API_KEY']}".encode()):
        return await answer(request)
    return JSONResponse({"error": "missing or wrong key"}, status_code=401)
