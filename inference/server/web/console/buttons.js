// Buttons that several parts of the page have.

import { make } from "./text.js";

export const button = (name, work) => {
  const element = make("button", "", name);
  element.type = "button";
  element.addEventListener("click", work);
  return element;
};

/** Puts a text where it can be pasted from; by a selection where a page may not do so itself. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}

/** A button that copies what `text` returns, and says that it did. */
export function copier(text) {
  const element = button("Copy", async () => {
    await copy(text());
    element.textContent = "Copied";
    setTimeout(() => (element.textContent = "Copy"), 1500);
  });
  return element;
}
