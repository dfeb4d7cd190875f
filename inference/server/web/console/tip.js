// What is shown of a token beside the pointer, or by the arrow keys: how likely it was, and what
// else could have come.

import { make, tokenOf } from "./text.js";

const tip = document.getElementById("tip");
let shown = null;

const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";

function percent(logprob) {
  const value = 100 * Math.exp(logprob);
  if (value >= 99.95) return "100 %";
  if (value < 0.01) return "< 0.01 %";
  return `${value.toFixed(value < 1 ? 2 : 1)} %`;
}

function row({ text, logprob }, isChosen) {
  const found = make("li", isChosen ? "chosen" : "");
  const bar = make("i");
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  const name = make("span", "name", visible(text));
  found.append(bar, name, make("span", "value", percent(logprob)));
  return found;
}

function show(span) {
  const token = tokenOf.get(span);
  hide();
  shown = span;
  span.classList.add("active");
  span.setAttribute("aria-describedby", "tip");
  const list = make("ol");
  const rank = token.top.findIndex(({ text }) => text === token.text);
  token.top.forEach((each, at) => list.append(row(each, at === rank)));
  if (rank < 0) list.append(row(token, true));
  tip.replaceChildren(list);
  tip.hidden = false;
  place(span);
}

/** Below the token, or above where there is no room. */
function place(span) {
  const [at] = span.getClientRects();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, at.left - 10), innerWidth - width - 8);
  const below = at.bottom + 8 + height < innerHeight;
  tip.style.left = `${left}px`;
  tip.style.top = `${below ? at.bottom + 8 : at.top - height - 8}px`;
}

export function hide() {
  shown?.classList.remove("active");
  shown?.removeAttribute("aria-describedby");
  shown = null;
  tip.hidden = true;
}

const spanAt = (event) => event.target.closest?.(".token") ?? null;

/** Pointers and keys over the tokens below `root`. */
export function watch(root) {
  root.addEventListener("pointerover", (event) => {
    const span = spanAt(event);
    if (span && span !== shown) show(span);
    else if (!span && !root.contains(document.activeElement?.closest(".token"))) hide();
  });
  root.addEventListener("pointerleave", hide);
  root.addEventListener("focusin", (event) => spanAt(event) && show(spanAt(event)));
  root.addEventListener("focusout", (event) => spanAt(event) && hide());
  addEventListener("scroll", () => shown && place(shown), { capture: true, passive: true });
  root.addEventListener("keydown", move);
}

/** From a text that has the focus, arrows lead to its tokens and along them. */
function move(event) {
  const body = event.target.closest(".body");
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!body || !step || event.target.closest("textarea, pre[tabindex]:focus")) return;
  const all = [...body.querySelectorAll(".token")];
  if (!all.length) return;
  const from = all.indexOf(event.target);
  const first = step === 1 || step === -Infinity ? 0 : all.length - 1;
  const to = from < 0 ? first : Math.min(Math.max(0, from + step), all.length - 1);
  const next = all[to];
  next.tabIndex = -1;
  next.focus();
  event.preventDefault();
}
