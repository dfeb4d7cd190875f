// JSON while it comes: what it says so far, and where it stops being JSON.

const BLANKS = /[ \t\n\r]*/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*/y;
const CUT_ESCAPE = /(?:\\(?:u[0-9a-fA-F]{0,3})?)?$/y;
const WORD = /[-+.0-9a-zA-Z]*/y; // a number, true, false or null
const CUT_WORD = /^(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-?[-+.0-9eE]*)$/;

/** Text that is not JSON: `index` is the first character that does not fit. */
export class NotJson extends Error {
  constructor(index, expected) {
    super(`expected ${expected}`);
    this.index = index;
  }
}

/** A number, true, false or null as it is written: numbers of JSON may be longer than JavaScript's. */
export class Literal {
  constructor(text) {
    this.text = text;
  }
}

/**
 * Reads JSON that may be cut off anywhere. Objects become maps, in the order of the text.
 *
 * @returns { value, isCut }: the value so far, undefined where none has begun.
 * @throws NotJson
 */
export function readPrefix(text) {
  let at = 0;
  let isCut = false;

  const take = (pattern) => {
    pattern.lastIndex = at;
    const match = pattern.exec(text)?.[0] ?? null;
    at += match?.length ?? 0;
    return match;
  };
  /** The next character that is not blank; undefined at the end of the text. */
  const peek = () => {
    take(BLANKS);
    isCut ||= at === text.length;
    return text[at];
  };
  const fail = (expected) => {
    throw new NotJson(at, expected);
  };

  function readString() {
    const match = take(STRING);
    if (text[at] === '"') at++;
    else if (take(CUT_ESCAPE) === null) fail("a closing quote, before a line ends or a bad escape");
    else isCut = true;
    return JSON.parse(`${match}"`);
  }

  function readWord() {
    const start = at;
    const word = take(WORD);
    isCut ||= at === text.length;
    try {
      JSON.parse(word);
      return new Literal(word);
    } catch {
      if (at === text.length && CUT_WORD.test(word)) return undefined;
      at = start;
      fail("a value");
    }
  }

  /** What stands between brackets: `readItem` reads one, up to the comma. */
  function readItems(close, readItem) {
    at++;
    if (peek() === close) return void at++;
    while (!isCut) {
      readItem();
      const next = peek();
      if (next === undefined) return;
      if (next !== "," && next !== close) fail(`"," or "${close}"`);
      at++;
      if (next === close) return;
      peek();
    }
  }

  function readMember(map) {
    if (text[at] !== '"') fail("a name in double quotes");
    const key = readString();
    if (isCut || peek() === undefined) return;
    if (text[at] !== ":") fail('":"');
    at++;
    map.set(key, readValue());
  }

  function readValue() {
    const next = peek();
    if (next === undefined) return undefined;
    if (next === '"') return readString();
    if (next === "{") {
      const map = new Map();
      readItems("}", () => readMember(map));
      return map;
    }
    if (next !== "[") return readWord();
    const list = [];
    readItems("]", () => {
      const item = readValue();
      if (item !== undefined) list.push(item);
    });
    return list;
  }

  const value = readValue();
  take(BLANKS);
  if (at < text.length) fail("the end of the text");
  return { value, isCut };
}
