// The page: what is typed, which conversation it goes to, and what keys do.

import { hasKey, keepKey } from "./client.js";
import { Conversation } from "./conversation.js";
import { Live } from "./live.js";
import * as settings from "./settings.js";
import * as tip from "./tip.js";
import * as tools from "./tools.js";

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const EXAMPLES = {
  chat: ["Why is the sky blue?", "What is a ridge line?", "Write three lines about rain."],
  text: ["Once upon a time", "The three laws of thermodynamics are", "def fibonacci(n):\n"],
};
const WORDS = {
  chat: ["Message", "Ask something", "Send"],
  text: ["Text to continue", "Text to continue", "Continue"],
};
const NEAR = 80; // pixels from the end within which the view follows what comes

// --- the key -------------------------------------------------------------------------------------

let asking = null;

/** Asks for a key, the last one having been refused; resolves once there is another. */
function askKey() {
  at("key-problem").textContent = hasKey()
    ? "The server refused this key. Check it for missing characters, or ask who runs the server."
    : "";
  if (asking) return asking.promise;
  asking = Promise.withResolvers();
  at("key-dialog").showModal();
  return asking.promise;
}

at("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
at("key-form").addEventListener("submit", () => {
  keepKey(at("key").value.trim());
  at("key").value = "";
  const { resolve } = asking;
  asking = null;
  resolve();
});

// --- live figures --------------------------------------------------------------------------------

function status(state, text) {
  at("lamp").className = state;
  at("model").textContent = text;
}

const live = new Live({
  heard(figures) {
    const isReady = figures.state === "ready";
    const name = figures.model || "the model";
    status(isReady ? "ready" : "busy", isReady ? name : `${name}: ${figures.state}`);
    at("sentence").textContent = isReady ? sentence(figures) : "The model is on its way.";
    const most = Math.min(4, figures.max_seqs || 1);
    if (at("n").max !== String(most)) at("n").max = most;
    at("send").disabled = !isReady;
    settings.allowChats(!isReady || figures.has_chats);
    settings.allowThoughts(isReady && figures.has_thoughts);
  },
  lost() {
    status("lost", "the server does not answer");
    at("send").disabled = true;
  },
  key: askKey,
});

function sentence({ model, max_seqs: sequences, max_context: context }) {
  return (
    `${model} answers here, up to ${digits(sequences)} sequences at once, each of up to ` +
    `${digits(context)} tokens. Nothing that you write leaves this page but to this server.`
  );
}

// --- conversations -------------------------------------------------------------------------------

const page = {
  fields: () => settings.sampling(live.figures),
  system: settings.systemPrompt,
  tools: tools.fields,
  changed(isBusy, news = "") {
    at("send").hidden = isBusy;
    at("stop-answer").hidden = !isBusy;
    at("said").textContent = isBusy ? "The answer begins." : `The answer has ended. ${news}`.trim();
    if (isBusy || news) follow(true);
    if (isBusy && document.activeElement === document.body) focusPrompt(); // what had it has gone
    showWelcome();
  },
  grown: () => follow(false),
  write(text) {
    prompt.value = text;
    prompt.focus();
    prompt.setSelectionRange(text.length, text.length);
  },
  needKey: askKey,
};
const conversations = {
  chat: new Conversation("chat", at("chat"), page),
  text: new Conversation("text", at("text"), page),
};
const current = () => conversations[settings.kind()];
const isBusy = () => Object.values(conversations).some((each) => each.isBusy);

/** Keeps the end in view, if it is, or in any case. */
function follow(always) {
  for (const box of [at("scroller"), document.scrollingElement]) {
    const left = box.scrollHeight - box.scrollTop - box.clientHeight;
    if (always || left < NEAR) box.scrollTop = box.scrollHeight;
  }
}

/** Not where it would bring a keyboard over the page. */
function focusPrompt() {
  if (!matchMedia("(pointer: coarse)").matches) prompt.focus();
}

function showWelcome() {
  at("welcome").hidden = current().turns.length > 0;
}

function showKind(kind) {
  for (const name of Object.keys(conversations)) at(name).hidden = name !== kind;
  const [label, placeholder, send] = WORDS[kind];
  at("prompt-label").textContent = label;
  prompt.placeholder = placeholder;
  at("send").textContent = send;
  at("examples").replaceChildren(
    ...EXAMPLES[kind].map((text) => {
      const found = document.createElement("button");
      found.type = "button";
      found.textContent = text.trim();
      found.addEventListener("click", () => page.write(text));
      return found;
    }),
  );
  showWelcome();
}

function send() {
  const text = prompt.value;
  if (!text.trim() || isBusy() || at("send").disabled) return;
  prompt.value = "";
  current().send(text);
}

const stop = () => Object.values(conversations).forEach((each) => each.stop());

// --- keys and buttons ----------------------------------------------------------------------------

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  tip.hide();
  stop();
});
at("stop-answer").addEventListener("click", () => {
  stop();
  prompt.focus();
});
at("clear").addEventListener("click", () => {
  current().clear();
  showWelcome();
  prompt.focus();
});

tip.watch(at("scroller"));
settings.start(showKind);
tools.start();
showKind(settings.kind());
focusPrompt();
live.run();
