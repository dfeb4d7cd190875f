"""Keywords of arrays that are said in other words."""

import itertools
import math

from configs.errors import InputError, shown
from inference.text.json_schema.document import TYPES, Document, Rewritten, as_list, values

_MAX_ORDERS = 128  # of values that each come once
_OTHER_TYPES = [kind for kind in TYPES if kind != "array"]
_MAX_POSITION = 8  # of the item that `contains` is about


def rewrite(document: Document, result: Rewritten, resource: object, place: str) -> None:
    """Rewrites `uniqueItems`, `contains`, `unevaluatedItems` and the words of older drafts.

    Raises:
        InputError: one of them is not said in other words.
    """
    schema = result.schema
    _modernize(schema)
    if (unevaluated := schema.pop("unevaluatedItems", True)) is not True and "items" not in schema:
        if schema.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "contains"}:
            raise InputError(
                f"{place}unevaluatedItems: is not supported beside keywords that evaluate items"
            )
        schema["items"] = unevaluated
    if schema.pop("uniqueItems", False):
        _list_orders(document, resource, place, result)
    if "contains" in schema:
        _place_item(place, result)
    schema.pop("minContains", None), schema.pop("maxContains", None)


def _modernize(schema: dict[str, object]) -> None:
    """Names lists of `items` and `additionalItems` as draft 2020-12 does."""
    additional = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if additional is not None:
            schema["items"] = additional


def _list_orders(document: Document, resource: object, place: str, result: Rewritten) -> None:
    """Arrays of few values are listed, in every order; of others the items may repeat."""
    schema = result.schema
    low, high = schema.get("minItems", 0), schema.get("maxItems", math.inf)
    if not all(isinstance(bound, int | float) for bound in (low, high)) or high < 2:
        return
    item, _ = document.resolved(schema.get("items", True), resource)
    listed = None if "prefixItems" in schema else values(item)
    if listed is None:
        result.relaxed.add("uniqueItems")
        return
    if low > len(listed):
        raise InputError(f"{place}minItems={low}: there are {len(listed)} different items")
    max_length = int(min(high, len(listed)))
    if sum(math.perm(len(listed), length) for length in range(low, max_length + 1)) > _MAX_ORDERS:
        result.relaxed.add("uniqueItems")
        return
    orders = [
        list(order)
        for length in range(low, max_length + 1)
        for order in itertools.permutations(listed, length)
    ]
    for name in ("items", "minItems", "maxItems"):
        schema.pop(name, None)
    is_array = schema.get("type") == "array"
    listing = {"enum": orders}
    result.extras.append(listing if is_array else {"anyOf": [{"type": _OTHER_TYPES}, listing]})


def _place_item(place: str, result: Rewritten) -> None:
    """One of the first items is what an array contains."""
    schema = result.schema
    part = schema.pop("contains")
    least, max_contains = schema.get("minContains", 1), schema.get("maxContains")
    if least == 0 and max_contains is None:
        return
    if least != 1 or max_contains is not None:
        name = "minContains" if least != 1 else "maxContains"
        raise InputError(f"{place}{name}={shown(schema[name])}: is not supported")
    high = schema.get("maxItems", _MAX_POSITION)
    positions = range(min(high, _MAX_POSITION) if isinstance(high, int) else _MAX_POSITION)
    options: list[object] = [
        {"type": "array", "prefixItems": [True] * index + [part], "minItems": index + 1}
        for index in positions
    ]
    if "array" in as_list(schema.get("type", "array")) and schema.get("type") != "array":
        options.append({"type": _OTHER_TYPES})
    result.extras.append({"anyOf": options} if options else False)
