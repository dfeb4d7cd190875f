// A value as rows of keys and values, drawn anew as more of it comes.

import { Literal } from "./partial_json.js";
import { make } from "./text.js";

const isList = (value) => value instanceof Map || Array.isArray(value);
const isPlain = (value) => Array.isArray(value) && !value.some(isList);

function kindOf(value) {
  if (value === undefined) return "none";
  if (isList(value)) return (value.size ?? value.length) ? (isPlain(value) ? "items" : "rows") : "empty";
  if (value === "") return "empty";
  return value instanceof Literal ? "literal" : "words";
}

function wordsOf(value) {
  if (value === undefined) return "";
  if (value === "") return "empty text";
  if (isList(value)) return value instanceof Map ? "no names" : "empty list";
  return value instanceof Literal ? value.text : value;
}

/** Children of `list`, as many as values: `add` makes one, `update` shows a value in it. */
function update(list, values, add, show) {
  values.forEach((value, at) => {
    if (at === list.children.length) list.append(add());
    show(list.children[at], value);
  });
  while (list.children.length > values.length) list.lastChild.remove();
}

function addRow() {
  const row = make("div");
  row.append(make("dt"), make("dd"));
  return row;
}

function write(box, text) {
  if (box.textContent !== text) box.textContent = text;
}

/** Shows a value in `box`, which may show an earlier part of it: maps, lists, texts and literals. */
export function showValue(box, value) {
  const kind = kindOf(value);
  if (box.dataset.kind !== kind) {
    box.dataset.kind = kind;
    box.replaceChildren();
    if (kind === "rows") box.append(make("dl"));
    if (kind === "items") box.append(make("ul"));
  }
  if (kind === "items") {
    update(box.firstChild, value, () => make("li"), showValue);
  } else if (kind === "rows") {
    const isMap = value instanceof Map;
    const entries = isMap ? [...value] : value.map((item, at) => [String(at), item]);
    update(box.firstChild, entries, addRow, (row, [key, item]) => {
      write(row.firstChild, key);
      showValue(row.lastChild, item);
    });
  } else write(box, wordsOf(value));
}
