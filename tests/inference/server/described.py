"""What a server sends, held against what it says of itself."""

from jsonschema import Draft202012Validator


def validator(server, path: str, media: str = "application/json", status: str = "200"):
    """Of the answers to a POST: of a stream each event is one."""
    described = server.http.get("/openapi.json").json()
    content = described["paths"][path]["post"]["responses"][status]["content"]
    schema = content[media]["schema"] | {"components": described["components"]}
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
