// Tokens of an answer, and which of its characters each of them is.

/** One shape for both endpoints: [{ bytes, logprob, top: [{ text, logprob }] }]. */
export function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content) {
    return found.content.map(({ token, bytes, logprob, top_logprobs: top }) => ({
      text: token,
      bytes: Uint8Array.from(bytes),
      logprob,
      top: top.map(({ token: text, logprob }) => ({ text, logprob })),
    }));
  }
  return found.tokens.map((text, at) => ({
    text,
    bytes: bytesOf(text),
    logprob: found.token_logprobs[at],
    top: Object.entries(found.top_logprobs[at] ?? {})
      .map(([text, logprob]) => ({ text, logprob }))
      .sort((a, b) => b.logprob - a.logprob),
  }));
}

/** A token that is no whole characters is spelled bytes:\xe4\xb8. */
function bytesOf(text) {
  if (!/^bytes:(\\x[0-9a-f]{2})+$/.test(text)) return new TextEncoder().encode(text);
  return Uint8Array.from(text.match(/[0-9a-f]{2}(?=\\|$)/g), (two) => parseInt(two, 16));
}

/**
 * Pairs of text and token, in the order of the text. Text that the server holds back, and bytes
 * that are no whole character yet, wait; tokens that are not in the text, such as the last one of
 * an answer, are left out.
 */
export class Alignment {
  #decoder = new TextDecoder();
  #tokens = []; // [what is still to come of its text, the token]
  #text = "";

  take(text, tokens) {
    this.#text += text;
    for (const token of tokens) {
      const own = this.#decoder.decode(token.bytes, { stream: true });
      if (own) this.#tokens.push([own, token]);
    }
    return this.#paired();
  }

  /** What is left at the end: part of a token, or of none. */
  end() {
    const found = this.#paired();
    if (this.#text) found.push([this.#text, this.#tokens[0]?.[1] ?? null]);
    this.#text = "";
    return found;
  }

  #paired() {
    const found = [];
    while (this.#text && this.#tokens.length) {
      const [own, token] = this.#tokens[0];
      const text = this.#text;
      if (own.length > text.length && own.startsWith(text)) return found; // the rest is held back
      const part = [own, own.trimStart()].find((each) => each && text.startsWith(each));
      this.#tokens.shift();
      if (!part) continue;
      found.push([part, token]);
      this.#text = text.slice(part.length);
    }
    if (this.#text) found.push([this.#text, null]); // there are no log-probabilities
    this.#text = "";
    return found;
  }
}
