"""What tests do at the console: they set, type, wait and read."""

import json

READY = "document.getElementById('lamp').className === 'ready'"
DONE = "document.querySelector('.turn:last-child .answer') && !document.querySelector('.waits')"


def put(page, **values):
    """Values of controls, as if a user had set them."""
    for id, value in values.items():
        page.do(
            f"(() => {{ const found = document.getElementById('{id}'); found.value = "
            f"{json.dumps(str(value))}; found.dispatchEvent(new Event('input', {{bubbles: true}}));"
            "})()"
        )


def pick(page, name, value):
    page.do(f"""document.querySelector('input[name="{name}"][value="{value}"]').click()""")


def send(page, text, waits=True):
    page.do("document.getElementById('prompt').focus()")
    page.type(text)
    page.press("Enter")
    if waits:
        page.wait(DONE)


def texts(page, query=".turn:last-child .answer .body"):
    return page.do(f"[...document.querySelectorAll('{query}')].map((each) => each.textContent)")
