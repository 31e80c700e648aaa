"""Routes that answer errors in OpenAI's form, which its clients turn into their exceptions."""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError

from server.web.middleware import from_validation, problem_response
from server.web.openapi import PROBLEM_JSON, operation_id
from server.web.routes import Handler, Route
from shared.errors import MobizoError
from shared.openai.answers import error_object

JSON = "application/json"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}


class OpenAIRoute(Route):
    """A route of OpenAI's API."""

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        for response in self.responses.values():
            if PROBLEM_JSON in response.get("content", {}):
                # What is refused before any route, such as an address with control characters, is a problem document.
                response["content"][JSON] = {"schema": ERROR_SCHEMA}

    def get_route_handler(self) -> Handler:
        """Returns the function that answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as wrong:
                error: MobizoError = from_validation(wrong)
            except MobizoError as refused:
                error = refused
            headers = dict(problem_response(error, request).headers)
            del headers["content-length"], headers["content-type"]
            return Response(json.dumps(error_object(error)), error.status, headers, JSON)

        return answer


class OpenAIRoutes(APIRouter):
    """Routes of OpenAI's API."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=OpenAIRoute, generate_unique_id_function=operation_id, **options)
