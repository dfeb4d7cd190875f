// The planner's page, of what is served here: its data need the key, so they come after it.

import { RequestError, ask } from "./client.js";

const SCRIPTS = ["plan.js", "format.js", "draw.js", "trade.js", "controls.js", "page.js"];

function say(message, role = "alert") {
  const found = document.createElement("p");
  found.setAttribute("role", role);
  found.textContent = message;
  document.getElementById("sentence").replaceChildren(found);
}

const RETRY_MS = 2000;

/** Its data, once the model is loaded. */
async function data() {
  for (;;) {
    try {
      return await ask("console/plan");
    } catch (error) {
      if (!(error instanceof RequestError) || error.status !== 503) throw error;
      say(`Waiting for the plan: ${error.message}.`, "status");
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }
}

async function start() {
  say("Loading the plan of what is served.", "status");
  const response = await data();
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
