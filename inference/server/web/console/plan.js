// The planner's page, of what is served here: its data need the key, so they come after it.

import { RequestError, ask } from "./client.js";

const SCRIPTS = ["plan.js", "format.js", "draw.js", "controls.js", "page.js"];

function say(message) {
  const found = document.createElement("p");
  found.setAttribute("role", "alert");
  found.textContent = message;
  document.getElementById("sentence").replaceChildren(found);
}

async function start() {
  const response = await ask("console/plan");
  document.getElementById("catalog").textContent = await response.text();
  for (const name of SCRIPTS) {
    const script = document.createElement("script");
    script.src = `plan/${name}`;
    script.async = false; // one after the other
    document.body.append(script);
  }
}

document.documentElement.dataset.theme = sessionStorage.getItem("ridgeline.theme") ?? "";
start().catch((error) => {
  const needsKey = error instanceof RequestError && error.status === 401;
  say(needsKey ? "This server asks for a key: give it on its first page, and come back." : error.message);
});
