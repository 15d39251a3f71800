"""JSON schemas to hold outputs to: some by hand, as many as wanted by chance. What they allow is bounded in length."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

Schema = dict[str, Any]

NAMES = ["a", "name", "größe", "名前", "with space", 'quo"te', "back\\slash", "", "😀", "$ref", "a.b", "x-y"]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration"]
CAPITALS = "^[A-Z][a-z]{0,5}( [A-Z][a-z]{0,5}){0,2}$"
PATTERNS = ["^[a-f0-9]{2,6}$", r"^(foo|bar)-\d{1,3}$", CAPITALS, "^[A-ZÄ]x?$", "^é{1,3}$"]
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SHORT = {"type": "string", "maxLength": 4}


def closed(required: list[str] | None = None, **properties: Schema) -> Schema:
    """An object with these properties, of which all or `required` must be there, and no others."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def listed(items: Schema, most: int) -> Schema:
    """A list of at most so many."""
    return {"type": "array", "items": items, "maxItems": most}


BY_HAND: list[Schema] = [
    {"enum": ["red", 1, None, True, 2.5, "grün", {"a": [1]}]},
    {"const": {"deep": ["é", {"x": None}]}},
    {"type": ["integer", "null"], "minimum": -5, "maximum": 5},
    {"type": "integer", "minimum": 10, "maximum": 120, "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "number", "minimum": -1.5, "maximum": 100.25},
    {"type": "string", "minLength": 3, "maxLength": 3},
    {"type": "string", "pattern": "^[0-9]{3}-[0-9]{4}$"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    {"type": "array", "prefixItems": [SHORT, DIGIT], "items": False, "minItems": 2},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^k[0-9]$": SHORT}, "additionalProperties": False, "maxProperties": 3},
    {"anyOf": [{"type": "null"}, closed(a=SHORT), {"type": "array", "items": {"const": 1}, "maxItems": 2}]},
    {"oneOf": [closed(kind={"const": "a"}, n=DIGIT), closed(kind={"const": "b"})]},
    {"allOf": [closed(a=SHORT, b=SHORT), {"required": ["a"]}, {"properties": {"b": {"minLength": 1}}}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": closed(["v"], v=DIGIT, kids=listed({"$ref": "#/$defs/tree"}, 1))}},
    {"definitions": {"id": DIGIT}, **closed(id={"$ref": "#/definitions/id"})},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "boolean"}}},
    closed(["street"], street=SHORT, zip={"type": "string", "pattern": "^\\d{5}$"}, country={"enum": ["DE", "FR"]}),
    closed(**{name: {"type": "null"} for name in NAMES}),
    closed([], a=SHORT, b=SHORT, c=SHORT, d=SHORT),
    closed(when={"type": "string", "format": "date-time"}, who={"type": "string", "format": "uuid"}),
    {"title": "Noted", "description": "d", "examples": [1], "default": True, "type": "boolean", "$comment": "c"},
]  # fmt: skip


class Maker:
    """Schemas by chance, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def make(self) -> Schema:
        """One with a definition that it refers to, or none."""
        depth = self._random.randrange(4)
        schema = self._any(depth, has_definition=True)
        return schema if "$ref" not in str(schema) else {**schema, "$defs": {"it": self._any(1)}}

    def _any(self, depth: int, *, has_definition: bool = False) -> Schema:
        kinds = [self._text, self._whole, self._number, self._values, self._plain]
        if depth:
            kinds += [self._list, self._object, self._object, self._either]
        if has_definition and depth < 3 and self._random.random() < 0.2:
            return {"$ref": "#/$defs/it"}
        kind = self._random.choice(kinds)
        return kind(depth - 1, has_definition) if kind in kinds[5:] else kind(depth, has_definition)

    def _text(self, depth: int, has_definition: bool) -> Schema:
        chance = self._random.random()
        if chance < 0.3:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        if chance < 0.6:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        least = self._random.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(6)}

    def _whole(self, depth: int, has_definition: bool) -> Schema:
        least = self._random.randrange(-2000, 2000)
        extra = {"multipleOf": self._random.choice([2, 3, 5, 10])} if self._random.random() < 0.3 else {}
        return {"type": "integer", "minimum": least, "maximum": least + self._random.randrange(20, 5000)} | extra

    def _number(self, depth: int, has_definition: bool) -> Schema:
        least = round(self._random.uniform(-100, 100), 2)
        names = self._random.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")])
        return {"type": "number"} | dict(zip(names, (least, least + self._random.choice([0.5, 1, 300])), strict=True))

    def _values(self, depth: int, has_definition: bool) -> Schema:
        values = ["", "é", "a\nb", '"', "😀 x", 0, -1.5, None, True, [1, "b"], {"k": {}}]
        return {"enum": self._random.sample(values, self._random.randrange(1, 6))}

    def _plain(self, depth: int, has_definition: bool) -> Schema:
        return self._random.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["boolean", "null"]}])

    def _list(self, depth: int, has_definition: bool) -> Schema:
        least = self._random.randrange(3)
        items = self._any(depth, has_definition=has_definition)
        schema = {"type": "array", "items": items, "minItems": least, "maxItems": least + self._random.randrange(3)}
        if self._random.random() < 0.3:
            schema["prefixItems"] = [self._any(0) for _ in range(2)]
        return schema

    def _object(self, depth: int, has_definition: bool) -> Schema:
        names = self._random.sample(NAMES, self._random.randrange(1, 5))
        properties = {name: self._any(depth, has_definition=has_definition) for name in names}
        return closed(self._random.sample(names, self._random.randrange(len(names) + 1)), **properties)

    def _either(self, depth: int, has_definition: bool) -> Schema:
        return {"anyOf": [self._any(depth, has_definition=has_definition) for _ in range(2)]}


def many(count: int, seed: int = 0) -> Iterator[Schema]:
    """Those by hand, and others up to so many."""
    yield from BY_HAND
    maker = Maker(seed)
    for _ in range(count - len(BY_HAND)):
        yield maker.make()
