// Turns: what was asked, and the answers to it side by side. They are kept here and nowhere else.

import { Answer, button, copier } from "./answer.js";
import { RequestError, ask, events } from "./client.js";
import { make } from "./text.js";

const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };

class Turn {
  answers = [];
  chosen = 0; // the answer that a conversation goes on from

  constructor(conversation, asked) {
    this.asked = asked;
    this.conversation = conversation;
    this.element = make("article", "turn");
    this.question = make("div", "question");
    this.columns = make("div", "columns");
    this.element.append(this.question, this.columns);
    this.#showQuestion();
  }

  get answered() {
    return this.answers[this.chosen]?.text ?? "";
  }

  /** Room for new answers in place of the old ones. */
  begin({ n, thinking_token_budget: budget }) {
    this.chosen = 0;
    this.answers = Array.from({ length: n }, (_, at) => new Answer(`Answer ${at + 1}`, budget));
    this.columns.replaceChildren(...this.answers.map((answer) => answer.element));
    this.columns.classList.toggle("several", n > 1);
  }

  /** What can be done with the answers, once they are whole. */
  offer() {
    const { conversation } = this;
    this.answers.forEach((answer, at) => {
      answer.under.append(button("Regenerate", () => conversation.again(this)));
      if (conversation.kind === "text")
        answer.under.append(button("Continue", () => conversation.write(this.asked + answer.text)));
      else if (this.answers.length > 1)
        answer.under.append((answer.choice = button("Go on from this", () => this.choose(at))));
    });
    if (this.answers.length > 1 && conversation.kind === "chat") this.choose(0);
  }

  choose(chosen) {
    this.chosen = chosen;
    this.answers.forEach((answer, at) => {
      answer.choice.setAttribute("aria-pressed", at === chosen);
      answer.element.classList.toggle("chosen", at === chosen);
    });
  }

  #showQuestion() {
    const text = make("p", "", this.asked);
    const under = make("div", "under");
    const edit = button("Edit", () => this.#edit());
    under.append(edit, copier(() => this.asked));
    this.question.replaceChildren(text, under);
  }

  #edit() {
    const field = make("textarea");
    field.value = this.asked;
    field.setAttribute("aria-label", "Message");
    const leave = () => {
      this.#showQuestion();
      this.question.querySelector("button").focus();
    };
    const save = () => {
      this.asked = field.value;
      this.#showQuestion();
      this.conversation.again(this);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) save();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const under = make("div", "under");
    under.append(button("Send", save), button("Cancel", leave));
    this.question.replaceChildren(field, under);
    field.focus();
  }
}

export class Conversation {
  turns = [];
  #stopping = null;

  /**
   * `kind`: chat or text; `element`: where turns are put; `page`: { fields(), system(),
   * changed(isBusy), grown(), write(text), needKey() }.
   */
  constructor(kind, element, page) {
    this.kind = kind;
    this.element = element;
    this.page = page;
  }

  get isBusy() {
    return this.#stopping !== null;
  }

  stop() {
    this.#stopping?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.element.replaceChildren();
  }

  write(text) {
    this.page.write(text);
  }

  send(text) {
    const turn = new Turn(this, text);
    this.turns.push(turn);
    this.element.append(turn.element);
    return this.#answer(turn);
  }

  /** Answers a turn anew; in a conversation what followed it goes. */
  again(turn) {
    if (this.isBusy) return;
    if (this.kind === "chat") {
      for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) later.element.remove();
    }
    return this.#answer(turn);
  }

  #body(turn) {
    const fields = this.page.fields();
    if (this.kind === "text") return { prompt: turn.asked, ...fields };
    const messages = [];
    const system = this.page.system();
    if (system) messages.push({ role: "system", content: system });
    for (const each of this.turns.slice(0, this.turns.indexOf(turn))) {
      if (!each.answered) continue; // it failed
      messages.push({ role: "user", content: each.asked });
      messages.push({ role: "assistant", content: each.answered });
    }
    messages.push({ role: "user", content: turn.asked });
    return { messages, ...fields };
  }

  async #answer(turn) {
    const body = this.#body(turn);
    turn.begin(body);
    this.#stopping = new AbortController();
    this.page.changed(true);
    try {
      const response = await ask(PATHS[this.kind], { body, signal: this.#stopping.signal });
      for await (const event of events(response)) {
        for (const choice of event.choices) turn.answers[choice.index].take(choice);
        this.page.grown();
      }
      for (const answer of turn.answers) answer.end("ended");
    } catch (error) {
      this.#failed(turn, error);
    } finally {
      this.#stopping = null;
      turn.offer();
      this.page.changed(false);
    }
  }

  #failed(turn, error) {
    if (this.#stopping.signal.aborted) {
      for (const answer of turn.answers) answer.end("cancelled");
      return;
    }
    const isOurs = error instanceof RequestError;
    turn.answers[0].fail(isOurs ? error.message : "The server cannot be reached.");
    for (const answer of turn.answers) answer.end("failed");
    if (error.status === 401) this.page.needKey();
  }
}
