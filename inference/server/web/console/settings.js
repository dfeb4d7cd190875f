// What the controls say, as fields of a request, and how they look.

const at = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;
const THEME = "ridgeline.theme";
const MOST_TOP = 5; // alternatives of a token

export const kind = () => chosen("kind");
export const numAnswers = () => Number(at("n").value);
export const systemPrompt = () => at("system").value.trim();

/** The fields of a request that both kinds have. */
export function sampling(figures) {
  const found = {
    temperature: Number(at("temperature").value),
    top_p: Number(at("top_p").value),
    n: numAnswers(),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (at("max_tokens").value) found.max_tokens = Number(at("max_tokens").value);
  const budget = at("thinking_token_budget");
  if (kind() === "chat" && budget.value && !at("thought-control").hidden)
    found.thinking_token_budget = Number(budget.value);
  if (at("seed").value) found.seed = Number(at("seed").value);
  const stop = at("stop").value.split("\n").filter(Boolean);
  if (stop.length) found.stop = stop;
  const most = Math.min(MOST_TOP, figures?.max_top_logprobs ?? 0);
  if (most) Object.assign(found, kind() === "chat" ? { logprobs: true, top_logprobs: most } : { logprobs: most });
  return found;
}

function sayRanges() {
  for (const range of document.querySelectorAll("#settings input[type=range]")) {
    const digits = range.id === "n" ? 0 : 2;
    at(`${range.id}-said`).textContent = Number(range.value).toFixed(digits);
  }
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  sessionStorage.setItem(THEME, theme);
}

/** A model without a template continues texts alone. */
export function allowChats(isAllowed) {
  const chat = document.querySelector('input[name="kind"][value="chat"]');
  chat.disabled = !isAllowed;
  if (!isAllowed && chat.checked) document.querySelector('input[name="kind"][value="text"]').click();
}

/** A budget bounds the thoughts of models that have some. */
export function allowThoughts(isAllowed) {
  at("thought-control").hidden = !isAllowed;
}

/** `onKind`: called when chats become completions, or the other way. */
export function start(onKind) {
  const theme = sessionStorage.getItem(THEME) ?? "";
  document.querySelector(`input[name="theme"][value="${theme}"]`).checked = true;
  setTheme(theme);
  at("settings").addEventListener("submit", (event) => event.preventDefault());
  at("settings").addEventListener("input", ({ target }) => {
    sayRanges();
    if (target.name === "theme") setTheme(target.value);
    if (target.name === "view") document.body.classList.toggle("tinted", target.value === "tinted");
    if (target.name === "kind") {
      for (const id of ["system-control", "tools-control"]) at(id).hidden = target.value !== "chat";
      onKind(target.value);
    }
  });
  at("unfold").addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("unfolded");
    at("unfold").setAttribute("aria-expanded", isOpen);
  });
  sayRanges();
}
