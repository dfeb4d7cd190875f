// The calls of an answer, and their results, which go back to the model together.

import { button } from "./buttons.js";
import { Call } from "./call.js";
import { make } from "./text.js";

export class Calls {
  #calls = [];
  #schemaOf;
  #replies = null;

  constructor(schemaOf) {
    this.#schemaOf = schemaOf;
    this.element = make("div", "calls");
    this.cards = make("div", "cards");
    this.row = make("div", "replies");
    this.row.hidden = true;
    this.note = make("span", "hint");
    this.sender = button("", () => this.#settle());
    this.editor = button("", () => {
      this.#ask();
      this.#calls[0].field.focus();
    });
    this.sender.className = "strong";
    this.editor.hidden = true;
    this.row.append(this.note, this.sender);
    this.element.append(this.cards, this.row);
  }

  /** Messages of the results; null where they did not go to the model. */
  get responses() {
    const isSettled = this.#calls.every((call) => call.result !== null);
    return isSettled ? this.#calls.map((call) => call.response) : null;
  }

  get requests() {
    return this.#calls.map((call) => call.request);
  }

  /** "2 calls wait for results", or nothing. */
  get waiting() {
    const { length } = this.#calls;
    if (this.#replies === null || this.responses !== null) return "";
    return length === 1 ? "A call waits for its result." : `${length} calls wait for results.`;
  }

  /** What a chunk says of them. */
  take(deltas) {
    for (const delta of deltas) {
      if (this.#calls[delta.index] === undefined) {
        this.#calls.at(-1)?.end(true);
        this.#calls[delta.index] = this.#add();
      }
      this.#calls[delta.index].take(delta);
    }
  }

  /** Nothing more comes; `isWhole`: the last call was not cut off. */
  end(isWhole) {
    this.#calls.at(-1)?.end(isWhole);
  }

  /** Asks for the results; `replies`: { isBusy(), send() }. */
  offer(replies) {
    this.#replies = replies;
    this.#ask();
  }

  /** The conversation goes on without them. */
  pass() {
    if (this.waiting) this.note.textContent = "Left out of what follows, without results.";
  }

  #add() {
    const call = new Call(this.#schemaOf, {
      entered: () => this.#next(),
      changed: () => this.#count(),
    });
    this.cards.append(call.element);
    return call;
  }

  #ask() {
    for (const call of this.#calls) call.ask();
    const noun = this.#calls.length > 1 ? "results" : "result";
    this.sender.textContent = `Send ${noun}`;
    this.editor.textContent = `Edit ${noun}`;
    this.editor.hidden = true;
    this.row.hidden = false;
    this.#count();
  }

  #count() {
    const { length } = this.#calls;
    const done = this.#calls.filter((call) => call.isAnswered).length;
    this.sender.disabled = done < length;
    this.note.textContent = length > 1 ? `${done} of ${length} results` : "";
  }

  /** Leads to the next result that is missing, or sends them. */
  #next() {
    const missing = this.#calls.find((call) => !call.isAnswered);
    if (missing) missing.field.focus();
    else this.#settle();
  }

  #settle() {
    if (this.#replies.isBusy()) return;
    for (const call of this.#calls) call.settle();
    this.row.hidden = true;
    this.editor.hidden = false;
    this.#replies.send();
  }
}
