"""docs/api.md from the tables of fields: `python -m tokenmill.server.reference > docs/api.md`."""

from __future__ import annotations

from collections.abc import Iterator

from tokenmill.schema import Field, Table, words
from tokenmill.server.apis import APIS

HEAD = """\
# The HTTP API, field by field

Made by `make api-docs` from `server/fields.py`, as are the schemas at /openapi.json.

A request's field is *honoured*; *refused*: any value but those listed, or null, is answered with 400 and its name;
or *meaningless* here: accepted, without effect. A field that is not listed is refused. Null is the same as leaving a
field out. A response's field is *given*, always null (*meaningless*), or *not given*.
"""
RESPONSE_STATUS = {"honoured": "given", "refused": "not given"}


def _row(field: Field, is_response: bool) -> str:
    allowed = words(field.schema)
    if field.status == "refused":
        allowed = "" if is_response or allowed == "null" else f"but for {allowed}"
    status = RESPONSE_STATUS.get(field.status, field.status) if is_response else field.status
    why = "; ".join(filter(None, ["required" if field.required and not is_response else "", field.why]))
    return f"| `{field.path}` | {status} | {allowed} | {why} |\n".replace("|  |", "| |").replace("|  |", "| |")


def _table(title: str, table: Table, is_response: bool) -> Iterator[str]:
    yield f"\n### {title.capitalize()}\n\n| field | | value | |\n|---|---|---|---|\n"
    yield from (_row(field, is_response) for field in table)


def reference() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, api in APIS.items():
        parts += [f"\n## {path}\n", *_table("request", api.request, False)]
        for title, table in api.answers.items():
            parts += _table(title, table, True)
    return "".join(parts)


if __name__ == "__main__":
    print(reference(), end="")
