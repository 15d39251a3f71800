"""JSON schemas of bodies: made from rows of a table, told in words, and checked with the place of what is wrong.

Only what the tables use is known here: type, enum, bounds, sizes, pattern, items, properties, required,
additionalProperties and anyOf, whose branches differ in their JSON type or in the value of their property `type`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.errors import InvalidRequest, UnsupportedField

Schema = dict[str, Any]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
TYPES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "boolean": ((bool,), "true or false"),
    "number": ((int, float), "a number"),
    "integer": ((int,), "a whole number"),
    "string": ((str,), "a string"),
    "array": ((list,), "a list"),
    "object": ((dict,), "an object"),
    "null": ((type(None),), "null"),
}
BOUNDS = frozenset(("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"))
MAX_SHOWN = 80
MANY = 2**31 - 1


def number(least: float | None = None, most: float | None = None, kind: str = "number") -> Schema:
    """A number from `least` to `most`."""
    return {"type": kind} | _given(minimum=least, maximum=most)


def whole(least: int | None = None, most: int | None = None) -> Schema:
    """A whole number from `least` to `most`."""
    return number(least, most, "integer")


def text(least: int | None = None, most: int | None = None) -> Schema:
    """A string of `least` to `most` characters."""
    return {"type": "string"} | _given(minLength=least, maxLength=most)


def array(items: Schema, least: int | None = None, most: int | None = None) -> Schema:
    """A list of `least` to `most` items."""
    return {"type": "array", "items": items} | _given(minItems=least, maxItems=most)


def record(required: Sequence[str] = (), /, **properties: Schema) -> Schema:
    """An object of these properties and no others; those that are not required may be null."""
    shown = {name: value if name in required else nullable(value) for name, value in properties.items()}
    return {"type": "object", "properties": shown, "required": list(required), "additionalProperties": False}


def full(**properties: Schema) -> Schema:
    """An object of all of these properties and no others."""
    return record(list(properties), **properties)


def tagged(kind: str, required: str = "", /, **properties: Schema) -> Schema:
    """An object of this `type` and these properties; those that are not `required` may be null."""
    return record(["type", *required.split()], type=one_of(kind), **properties)


def one_of(*values: Any) -> Schema:
    """One of these values."""
    return {"enum": list(values)}


def either(*branches: Schema) -> Schema:
    """Any of these."""
    return {"anyOf": list(branches)}


def nullable(schema: Schema) -> Schema:
    """This or null."""
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    return schema and either(*schema.get("anyOf", [schema]), NULL)


def _given(**bounds: Any) -> Schema:
    return {name: bound for name, bound in bounds.items() if bound is not None}


@dataclass(frozen=True, slots=True)
class Field:
    """A row of the table. `path` is such as "messages[].content"; `status` is one of those of `honoured` and so on."""

    path: str
    schema: Schema
    status: str
    why: str = ""
    required: bool = False


Rows = Field | Iterable["Rows"]


def honoured(path: str, schema: Schema, why: str = "", *, required: bool = False) -> Field:
    """A request's field that has effect, or a response's that is given."""
    return Field(path, schema, "honoured", why, required)


def meaningless(paths: str, schema: Schema, why: str) -> list[Field]:
    """Fields, by blanks apart, that are accepted without effect; or that are null in responses."""
    return [Field(path, schema, "meaningless", why) for path in paths.split()]


def refused(paths: str, why: str, *neutral: Any) -> list[Field]:
    """Fields, by blanks apart, that only take null and `neutral` values; or that responses do not have."""
    return [Field(path, {"enum": list(neutral), "x-refused": True}, "refused", why) for path in paths.split()]


def given(path: str, schema: Schema, why: str = "") -> Field:
    """A response's field that is always there."""
    return honoured(path, schema, why, required=True)


class Table:
    """The fields of one kind of body, and its schema. A nested field comes after the one that holds it."""

    def __init__(self, *rows: Rows) -> None:
        self.fields: Mapping[str, Field] = {field.path: field for field in _flat(rows)}
        self.schema = record()
        for field in self.fields.values():
            _insert(self.schema, field)

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields.values())

    def check_all(self, body: Mapping[str, Any]) -> None:
        """Raises InvalidRequest, naming the place, unless the body may be so."""
        for name in dict.fromkeys([*body, *self.schema["required"]]):
            self.check(name, body.get(name))

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest, naming the place, unless the top-level field may have this value."""
        _check_property(self.schema, name, value, name[:MAX_SHOWN])


def without(names: str, *rows: Rows) -> list[Field]:
    """The rows, but for those of these names, by blanks apart, and what is nested in them."""
    return [field for field in _flat(rows) if field.path.partition(".")[0] not in names.split()]


def _flat(rows: Rows) -> Iterator[Field]:
    if isinstance(rows, Field):
        yield rows
    else:
        for row in rows:
            yield from _flat(row)


def _insert(node: Schema, field: Field) -> None:
    *parents, name = field.path.split(".")
    for parent in parents:
        node = node["properties"][parent.rstrip("[]")]
        for kind in ["array"] * parent.count("[]") + ["object"]:
            node = next((branch for branch in node.get("anyOf", ()) if branch.get("type") == kind), node)
            node = node["items"] if kind == "array" else node
    schema = copy.deepcopy(field.schema)
    words = "; ".join(filter(None, ["" if field.status == "honoured" else field.status, field.why]))
    schema = (schema if field.required else nullable(schema)) | ({"description": words} if words else {})
    node.setdefault("properties", {})[name] = schema
    node["additionalProperties"] = False
    node["required"] = [*node.get("required", ()), *([name] if field.required else ())]


def check(value: Any, schema: Schema, where: str) -> None:
    """Raises InvalidRequest, naming the place, for a value that the schema does not allow."""
    if "anyOf" in schema:
        schema = _branch(value, schema, where)
    if "enum" in schema:
        if any(equals(value, allowed) for allowed in schema["enum"]):
            return
        if not schema.get("x-refused"):
            raise InvalidRequest(f"{where} must be {words(schema)}", where)
        why = schema.get("description", "").removeprefix("refused").removeprefix("; ")
        told = f"{where} is not supported with this value{f' ({why})' if why else ''}: leave it out"
        raise UnsupportedField(told, where)
    if not _is_of(value, schema.get("type")):
        raise InvalidRequest(f"{where} must be {words(schema)}, not {kind_of(value)}", where)
    if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
        raise InvalidRequest(f"{where} must match {schema['pattern']}", where)
    if not BOUNDS.isdisjoint(schema):
        size = len(value) if isinstance(value, str | list) else value
        least, most = _bounds(schema)
        if not (least is None or least <= size) or not (most is None or size <= most):
            raise InvalidRequest(f"{where} must be {words(schema)}", where)
    if "items" in schema:
        for index, item in enumerate(value):
            check(item, schema["items"], f"{where}[{index}]")
    elif "properties" in schema:
        for name, item in value.items():
            if item is not None or name in schema["properties"]:  # clients send back all that they know, as null
                _check_property(schema, name, item, f"{where}.{name[:MAX_SHOWN]}")
        for name in schema["required"]:
            if name not in value:
                raise InvalidRequest(f"{where}.{name} is missing", f"{where}.{name}")


def _check_property(schema: Schema, name: str, value: Any, where: str) -> None:
    known = schema["properties"].get(name)
    if known is None:
        if schema.get("additionalProperties", True):
            return
        raise UnsupportedField(f"{where} is not a known field: check its spelling or leave it out", where)
    check(value, known, where)


def _branch(value: Any, schema: Schema, where: str) -> Schema:
    """The branch that the value is meant to be."""
    branches: list[Schema] = [branch for branch in schema["anyOf"] if _fits(value, branch)]
    if len(branches) == 1:
        return branches[0]
    if not branches:
        raise InvalidRequest(f"{where} must be {words(schema)}, not {kind_of(value)}", where)
    if isinstance(value, list):
        fitting = (branch for branch in branches if value and _fits(value[0], branch.get("items") or NULL))
        return next(fitting, branches[0])
    tags = [branch.get("properties", {}).get("type", {}).get("enum") for branch in branches]
    if not isinstance(value, dict) or None in tags:
        return branches[0]
    for branch, tag in zip(branches, tags, strict=True):
        if value.get("type") in tag:
            return branch
    raise InvalidRequest(
        f"{where}.type must be {words(one_of(*(value for tag in tags for value in tag)))}", f"{where}.type"
    )


def _fits(value: Any, branch: Schema) -> bool:
    if "enum" in branch:
        return any(equals(value, item) for item in branch["enum"])
    return _is_of(value, branch.get("type"))


def _is_of(value: Any, kind: str | None) -> bool:
    return kind is None or (isinstance(value, TYPES[kind][0]) and (kind == "boolean" or not isinstance(value, bool)))


def equals(value: Any, other: Any) -> bool:
    """Equal as JSON: true is not 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def kind_of(value: Any) -> str:
    """A JSON value's type, in words."""
    return next(name for kinds, name in TYPES.values() if isinstance(value, kinds))


def _bounds(schema: Schema) -> tuple[Any, Any]:
    names = (("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"))
    pairs = [(schema.get(least), schema.get(most)) for least, most in names]
    return next((pair for pair in pairs if pair != (None, None)), (None, None))


def words(schema: Schema) -> str:
    """What the schema allows; null and bounds of int32 are not spoken of."""
    if "enum" in schema:
        values = [msgspec.json.encode(value).decode() for value in schema["enum"] if value is not None]
        return values[0] if len(values) == 1 else f"one of {', '.join(values)}" if values else "null"
    if "anyOf" in schema:
        return ", or ".join(dict.fromkeys(words(branch) for branch in schema["anyOf"] if branch != NULL))
    kind = schema.get("type")
    if kind is None:
        return "any value"
    least, most = (None if bound is None or abs(bound) >= MANY else f"{bound:,}" for bound in _bounds(schema))
    unit = {"string": " characters", "array": " items"}.get(kind, "")
    joint = "of" if unit else "from"
    sizes = f" {joint} {least} to {most}{unit}" if least and most else f" of at least {least}{unit}" if least else ""
    shown = f"{TYPES[kind][1]}{sizes or (f' of at most {most}{unit}' if most else '')}"
    items = schema.get("items", OBJECT)
    return shown if items == OBJECT else f"{shown}, each {words(items)}"
