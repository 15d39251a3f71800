"""Requests made from a server's own OpenAPI schema, and answers held to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode

from tests.support.judge import fault_of

EXAMPLES = int(os.environ.get("TOKENMILL_EXAMPLES", "3"))  # of each operation and mode
CONFORMANCE = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
Send = Callable[[httpx.Request], httpx.Response]


def hold_to_schema(send: Send, document: dict[str, Any], checks: tuple[str, ...] = CONFORMANCE) -> int:
    """Try every operation with data that its schema allows, and data that it does not; returns how many were sent."""
    load_all_checks()
    functions: list[Any] = list(CHECKS.get_by_names(checks))
    schema = schemathesis.openapi.from_dict(document)
    count = 0

    def look(case: Any) -> None:
        nonlocal count
        count += 1
        prepared = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
        body: Any = prepared.body
        headers: Any = prepared.headers
        request = httpx.Request(prepared.method or "", prepared.url or "", headers=headers, content=body)
        response = send(request)
        fault = fault_of(response)
        assert fault is None, f"{fault}: {request.method} {request.url} {body!r} {response.text[:500]}"
        case.validate_response(response, checks=functions)

    for result in schema.get_all_operations():
        operation: Any = result.ok()  # type: ignore[union-attr]
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue
            one_of_it = given(case=operation.as_strategy(generation_mode=mode))(look)
            settings(
                max_examples=EXAMPLES,
                deadline=None,
                database=None,
                derandomize=True,
                phases=(Phase.explicit, Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            )(one_of_it)()
    return count
