// Turns: what was asked, and the answers to it side by side. They are kept here and nowhere else.

import { Answer } from "./answer.js";
import { button, copier } from "./buttons.js";
import { RequestError, ask, events } from "./client.js";
import { make } from "./text.js";
import { schemaOf } from "./tools.js";

const PATHS = { chat: "v1/chat/completions", text: "v1/completions" };

class Turn {
  answers = [];
  chosen = 0; // the answer that a conversation goes on from
  warning = null;

  /** `asked`: null where the model goes on from results of the turn before. */
  constructor(conversation, asked) {
    this.asked = asked;
    this.conversation = conversation;
    this.element = make("article", "turn");
    this.question = make("div", "question");
    this.columns = make("div", "columns");
    if (asked === null) this.element.classList.add("goes-on");
    else this.#showQuestion();
    this.element.append(this.question, this.columns);
  }

  get answer() {
    return this.answers[this.chosen];
  }

  /** Room for new answers in place of the old ones. */
  begin({ n, thinking_token_budget: budget = null, tools = [] }) {
    this.chosen = 0;
    const schema = (name) => schemaOf(tools, name);
    this.answers = Array.from({ length: n }, (_, at) => new Answer(`Answer ${at + 1}`, budget, schema));
    this.columns.replaceChildren(...this.answers.map((answer) => answer.element));
    this.columns.classList.toggle("several", n > 1);
  }

  /** `format`: of calls that the server does not read, or null. */
  warn(format) {
    this.warning?.remove();
    if (format === null) return;
    const words = `This model writes calls as ${format} does. The server does not read these: they stay text.`;
    this.warning = make("p", "warning", words);
    this.columns.before(this.warning);
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
      if (answer.calls === null || !answer.isWhole) return;
      answer.calls.offer(this.#replies(at));
      answer.under.append(answer.calls.editor);
    });
    if (this.answers.length > 1 && conversation.kind === "chat") this.choose(0);
  }

  choose(chosen) {
    if (chosen !== this.chosen) this.conversation.dropResults(this);
    this.chosen = chosen;
    this.answers.forEach((answer, at) => {
      answer.choice?.setAttribute("aria-pressed", at === chosen);
      answer.element.classList.toggle("chosen", at === chosen);
    });
  }

  /** Where results of an answer's calls go. */
  #replies(at) {
    return {
      isBusy: () => this.conversation.isBusy,
      send: () => {
        if (this.answers.length > 1) this.choose(at);
        this.conversation.goOn(this);
      },
    };
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
   * tools(followsResults), changed(isBusy, news), grown(), write(text), needKey() }.
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
    for (const answer of this.turns.at(-1)?.answers ?? []) answer.calls?.pass();
    return this.#answer(this.#add(text));
  }

  /** Answers a turn anew; in a conversation what followed it goes. */
  again(turn) {
    if (this.isBusy) return;
    if (this.kind === "chat") this.#drop(this.turns.indexOf(turn) + 1);
    return this.#answer(turn);
  }

  /** Answers results of a turn's calls; what followed it goes. */
  goOn(turn) {
    this.#drop(this.turns.indexOf(turn) + 1);
    return this.#answer(this.#add(null));
  }

  /** Takes what follows results of a turn's calls away. */
  dropResults(turn) {
    const next = this.turns.indexOf(turn) + 1;
    if (this.turns[next]?.asked !== null) return;
    this.stop();
    this.#drop(next);
  }

  #add(asked) {
    const turn = new Turn(this, asked);
    this.turns.push(turn);
    this.element.append(turn.element);
    return turn;
  }

  #drop(start) {
    for (const turn of this.turns.splice(start)) turn.element.remove();
  }

  #body(turn) {
    const fields = this.page.fields();
    if (this.kind === "text") return { prompt: turn.asked, ...fields };
    return { messages: this.#messages(turn), ...fields, ...this.page.tools(turn.asked === null) };
  }

  /** Thoughts go back to the model where it goes on from the calls that they led to. */
  #messages(turn) {
    const system = this.page.system();
    const messages = system ? [{ role: "system", content: system }] : [];
    const earlier = this.turns.slice(0, this.turns.indexOf(turn));
    const start = turn.asked === null ? earlier.findLastIndex(({ asked }) => asked !== null) : Infinity;
    earlier.forEach(({ asked, answer }, at) => {
      const answered = answer.messages(at >= start);
      if (!answered.length) return; // it failed, or its calls have no results
      if (asked !== null) messages.push({ role: "user", content: asked });
      messages.push(...answered);
    });
    if (turn.asked !== null) messages.push({ role: "user", content: turn.asked });
    return messages;
  }

  async #answer(turn) {
    const body = this.#body(turn);
    turn.begin(body);
    this.#stopping = new AbortController();
    this.page.changed(true);
    try {
      const response = await ask(PATHS[this.kind], { body, signal: this.#stopping.signal });
      turn.warn(response.headers.get("x-unread-tool-format"));
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
      this.page.changed(false, turn.answer.calls?.waiting);
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
