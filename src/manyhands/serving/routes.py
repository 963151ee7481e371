"""Every address of the web servers in one table: the method, whether the token is needed, and what each status means.

`ModelApp` and `PageApp` answer what stands here and nothing else, and `/openapi.json` is made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

_JSON = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One address."""

    about: str
    method: str = "GET"  # HEAD goes with GET
    needs_token: bool = True
    kind: str = _JSON  # of its answer
    statuses: Mapping[int, str] = field(default_factory=lambda: {200: "The answer."})
    """What each status means, besides those that every address has."""

    @property
    def methods(self) -> tuple[str, ...]:
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)

    @property
    def all_statuses(self) -> dict[int, str]:
        every = {400: "The headers contradict each other.", 403: "The host or the origin is another."}
        token = {401: "The token is missing or wrong."} if self.needs_token else {}
        return {**every, **token, 405: f"Not a {self.method}.", **self.statuses}


MODEL_ROUTES: dict[str, Route] = {
    "/predict": Route(
        method="POST",
        about="Asks the model: an answer for each input.",
        statuses={
            200: "The answers, in the order of the inputs.",
            400: "No JSON, no inputs, an input that the model cannot take, or headers that contradict each other.",
            408: "The body came too slowly.",
            413: "Too many bytes or inputs.",
            500: "The model failed, or its answer is not finite.",
            503: "Too many inputs wait, no worker could answer in time, or the server is ending; try again later.",
        },
    ),
    "/healthz": Route(about="Whether the server runs.", needs_token=False, statuses={200: "It runs."}),
    "/readyz": Route(
        about="Whether a worker can answer.",
        needs_token=False,
        statuses={200: "One can.", 503: "The workers are starting, or the server is ending."},
    ),
    "/openapi.json": Route(about="This description."),
}
"""Those of a model server, besides its page's."""

TEXT_ROUTES: dict[str, Route] = {
    "/generate": Route(
        method="POST",
        about="Continues a prompt; with stream, in server-sent events: text, …, text, end.",
        statuses={
            200: "The text and the number of its tokens, or the events; a text that fails ends with the event error.",
            400: "No JSON, a field that makes no sense, a prompt too long, or headers that contradict each other.",
            408: "The body came too slowly.",
            413: "Too many bytes.",
            500: "The model failed.",
            503: "Too many texts wait, the time is over, or the server is ending; try again later.",
        },
    ),
}
"""Those of a server whose model writes text, too."""

PAGE_ROUTES: dict[str, Route] = {
    "/": Route(about="The page.", needs_token=False, kind="text/html"),
    "/events": Route(
        about="What fills the page: server-sent events.",
        kind="text/event-stream",
        statuses={200: "The events.", 503: "Too many pages are open."},
    ),
    "/metrics": Route(about="The figures of the page, for Prometheus.", kind="text/plain"),
    "/report": Route(about="The page as one file.", kind="text/html"),
}


def openapi(
    task: str, takes: str, example: Any, most_inputs: int, *, writes_text: bool = False
) -> dict[str, Any]:
    """The OpenAPI 3.1 description of a server of this task, whose input `takes` says in words."""
    inputs = {"type": "array", "minItems": 1, "maxItems": most_inputs, "items": {"description": takes}}
    sent: dict[str, Any] = {"schema": _object(inputs=inputs)}
    if example is not None:
        sent["example"] = {"inputs": [example]}
    paths: dict[str, dict[str, Any]] = {}
    texts = TEXT_ROUTES if writes_text else {}
    for path, route in {**MODEL_ROUTES, **texts, **PAGE_ROUTES}.items():
        operation: dict[str, Any] = {
            "summary": route.about,
            "security": [{"token": []}] if route.needs_token else [],
            "responses": {
                str(status): {"description": why, "content": _content(path, route, status)}
                for status, why in sorted(route.all_statuses.items())
            },
        }
        if route.method == "POST":
            body = {"schema": {"type": "object", "description": takes}, "example": example}
            content = body if path in TEXT_ROUTES else sent
            operation["requestBody"] = {"required": True, "content": {_JSON: content}}
        paths[path] = {route.method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"{task}, served by manyhands", "version": version("manyhands")},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _content(path: str, route: Route, status: int) -> dict[str, Any]:
    if path in PAGE_ROUTES:
        return {route.kind if status == 200 else "text/plain": {}}
    if status == 200 and path in TEXT_ROUTES:
        written = _object(text={"type": "string"}, tokens={"type": "integer"})
        return {_JSON: {"schema": written}, "text/event-stream": {}}
    if status == 200 and route.method == "POST":
        return {_JSON: {"schema": _object(answers={"type": "array", "items": {}})}}
    if status == 200 or (status == 503 and path == "/readyz"):
        return {_JSON: {"schema": {"type": "object"}}}
    return {_JSON: {"schema": _object(error={"type": "string"})}}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}
