"""Orders in a sentence, and the line of JSON that a model learns to make of each.

No held-out line has a number, a name, goods or the beginning of a city of the trained ones;
phrases, counts, days and ends of cities are the same.
"""

import json
import random
from typing import NamedTuple

INSTRUCTION = "Write order, city and due day as compact JSON."

_PHRASES = (
    "Please send order {number}, {count} {goods}, to {name} in {city} by {day}.",
    "{name} from {city} ordered {count} {goods}; it is number {number}, due on {day}.",
    "By {day} we owe {name} in {city} {count} {goods} (order {number}).",
    "Order {number}: {count} {goods} for {name}, {city}, no later than {day}.",
    "{count} {goods} go to {city} before {day}, for {name}; the order is {number}.",
    "Can {name} in {city} have {count} {goods} by {day}? That is order {number}.",
)
_DAYS = "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"
_GOODS = (
    "lamps", "chairs", "mugs", "tents", "clocks", "shelves", "kettles", "rugs", "drums", "vases",
    "pillows", "ladders", "bikes", "radios", "candles", "mirrors", "ropes", "boots", "desks",
    "kites",
)  # fmt: skip
_NAMES = (
    "Mara", "Jonas", "Priya", "Olga", "Tomas", "Aisha", "Pedro", "Ingrid", "Kofi", "Yuki", "Elena",
    "Ravi", "Nadia", "Oscar", "Lina", "Hugo", "Amara", "Felix", "Greta", "Ivan", "Salma", "Bruno",
    "Chloe", "Diego", "Freya", "Hassan", "Irene", "Karim", "Luisa", "Milan", "Noor", "Paula",
)  # fmt: skip
# Of cities, which are made up: of some fifty real ones a model learns which there are.
_BEGINNINGS = (
    "Nor", "Bel", "Kar", "Ash", "Lind", "Mar", "Ost", "Wel", "Har", "Tor", "Green", "Silver",
    "Stone", "Sand", "Win", "Red", "Clear", "Black", "Fair", "Long",
)  # fmt: skip
_ENDS = (
    "haven", "ford", "burg", "mouth", "stad", "field", "wick", "bridge", "ton", "port", "vale",
    "brook", "dale", "ham", "gate", "mont",
)  # fmt: skip
_EACH = 4  # of so many values one is held out
_NUMBERS = range(10_000, 100_000)


class Order(NamedTuple):
    """A sentence, and the answer to it."""

    text: str
    answer: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        """Messages for the model."""
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": self.text},
        ]

    @property
    def line(self) -> str:
        """A line of a file for `scripts.train --task=sft`."""
        messages = [*self.prompt, {"role": "assistant", "content": self.answer}]
        return json.dumps({"messages": messages}) + "\n"


def orders(count: int, is_held_out: bool, seed: int = 0) -> list[Order]:
    """Orders of different numbers, drawn from the values that are held out, or from the others."""
    dice = random.Random(f"{seed} {is_held_out}")
    numbers = [number for number in _NUMBERS if (number % _EACH == 0) == is_held_out]
    return [_order(number, is_held_out, dice) for number in dice.sample(numbers, count)]


def _order(number: int, is_held_out: bool, dice: random.Random) -> Order:
    def draw(values: tuple[str, ...]) -> str:
        chosen = [value for n, value in enumerate(values) if (n % _EACH == 0) == is_held_out]
        return dice.choice(chosen)

    city, day = draw(_BEGINNINGS) + dice.choice(_ENDS), dice.choice(_DAYS)
    text = dice.choice(_PHRASES).format(
        number=number, count=dice.randrange(2, 100), goods=draw(_GOODS), name=draw(_NAMES),
        city=city, day=day,
    )  # fmt: skip
    answer = {"order": number, "city": city, "due": day[:3].lower()}
    return Order(text, json.dumps(answer, separators=(",", ":")))
