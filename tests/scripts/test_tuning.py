"""The small task that adapters are measured by."""

import json
import re

from scripts.reports.tuning import orders


def test_held_out_orders_have_other_values_than_trained_ones():
    trained, held_out = (orders.orders(600, is_held_out) for is_held_out in (False, True))
    for number, batch in ((lambda n: n % 4, trained), (lambda n: not n % 4, held_out)):
        answers = [json.loads(order.answer) for order in batch]
        assert all(number(answer["order"]) for answer in answers)
        assert len({answer["order"] for answer in answers}) == 600
        for order, answer in zip(batch, answers, strict=True):
            day = next(day for day in re.findall(r"[A-Z]\w+day", order.text))
            assert answer["due"] == day[:3].lower() and answer["city"] in order.text
    common = [set(re.findall(r"\w+", " ".join(order.text for order in batch)))
              for batch in (trained, held_out)]  # fmt: skip
    shared = {word for word in common[0] & common[1] if word[0].isupper()}
    assert shared <= {*orders._DAYS, "Please", "By", "Order", "Can", "That"}
