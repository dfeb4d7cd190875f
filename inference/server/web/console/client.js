// Requests to the server that sent this page, with the key of this tab where there is one.

const KEY = "ridgeline.key";

export class RequestError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const keepKey = (key) => sessionStorage.setItem(KEY, key);

/** The response to a request that succeeds; `body` makes it a POST. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    signal,
    body: body && JSON.stringify(body),
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new RequestError(response.status, said?.error?.message ?? `the server said ${response.status}`);
}

/** The events of a stream as objects, up to its end or to [DONE]; errors among them are thrown. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ")) continue; // a comment, which keeps the connection
      if (block === "data: [DONE]") return;
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new RequestError(200, event.error.message);
      yield event;
    }
  }
}
