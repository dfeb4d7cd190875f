// A text as it grows: paragraphs and blocks of code, each token an element of its own.

const FENCE = /^ {0,3}```/;

export const make = (name, className = "", content = "") => {
  const found = document.createElement(name);
  if (className) found.className = className;
  if (content) found.textContent = content;
  return found;
};

/** Tokens in the order of the text, by the elements that show them. */
export const tokenOf = new WeakMap();

export class Text {
  #root;
  #block = null; // the paragraph or the code that is being written
  #isCode = false;
  #newlines = 0; // before what comes next
  #held = []; // the start of a line, while it may be a fence

  constructor(root) {
    this.#root = root;
  }

  /** Appends a piece of text; `token` is what tokens.js says of it, or null. */
  push(text, token) {
    for (const part of text.split(/(\n)/)) {
      if (part === "\n") this.#endLine();
      else if (part) this.#write(part, token);
    }
  }

  end() {
    if (!FENCE.test(this.#line())) this.#release();
  }

  #line() {
    return this.#held?.map(([text]) => text).join("") ?? "";
  }

  #write(text, token) {
    if (this.#held === null) return this.#put(text, token);
    this.#held.push([text, token]);
    const line = this.#line();
    const start = line.trimStart();
    if (!FENCE.test(line) && !"```".startsWith(start)) this.#release();
  }

  #release() {
    const held = this.#held ?? [];
    this.#held = null;
    if (!this.#isCode && !held.some(([text]) => text.trim())) return;
    for (const [text, token] of held) this.#put(text, token);
  }

  #endLine() {
    const line = this.#line();
    if (FENCE.test(line)) this.#fence(line.trim().replace(/^`+/, "").trim());
    else {
      this.#release();
      this.#newlines++;
    }
    this.#held = [];
  }

  #fence(language) {
    this.#newlines = 0;
    this.#isCode = !this.#isCode;
    this.#block = null;
    if (!this.#isCode) return;
    const box = make("pre");
    box.tabIndex = 0; // it may scroll
    box.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    if (language) box.append(make("span", "language", language));
    this.#block = make("code");
    box.append(this.#block);
    this.#root.append(box);
  }

  #put(text, token) {
    if (!this.#isCode && this.#newlines > 1) this.#block = null;
    if (this.#block === null) {
      this.#block = make(this.#isCode ? "code" : "p");
      this.#root.append(this.#block);
    } else if (this.#newlines) this.#block.append("\n".repeat(this.#newlines));
    this.#newlines = 0;
    if (token === null) return this.#block.append(text);
    const space = text.trim() ? text.length - text.trimStart().length : 0; // between words
    const span = make("span", `token p${level(token.logprob)}`, text.slice(space));
    tokenOf.set(span, token);
    this.#block.append(text.slice(0, space), span);
  }
}

/** 1 to 6: how much of a surprise a token was, by its probability. */
function level(logprob) {
  const p = Math.exp(logprob);
  return [0.9, 0.7, 0.45, 0.2, 0.07].findIndex((least) => p >= least) + 1 || 6;
}
