// The server's figures as they change: what it says once a second, as charts of the last minute.
// `digits`, `scaled` and `SECONDS` are the planner's, from format.js.

import { Chart, nearest, recent } from "./charts.js";
import { RequestError, ask, events } from "./client.js";

const RETRY_S = [1, 2, 5];

const ratio = (part, whole) => (whole > 0 ? part / whole : null);
const latest = (name) => (sample) => sample[name];
const shown = (value, units) => (value === null ? ["–"] : scaled(value, units));

const LOOKS = {
  rate: {
    lines: [{ of: latest("rate"), classes: "ink", isFilled: true }],
    tick: digits,
    show: ({ rate }) => [digits(rate)],
    note: ({ rate, running }) => rate ? `${digits(rate / Math.max(1, running))} a sequence` : "idle",
  },
  first: {
    lines: [{ of: latest("first"), classes: "ink", isScattered: true }],
    tick: (value) => seconds(value),
    show: ({ lastFirst }) => shown(lastFirst, SECONDS),
    note: ({ answers }) => `${digits(answers)} answer${answers === 1 ? "" : "s"} so far`,
  },
  step: {
    lines: [
      { of: latest("predicted"), classes: "compute dashed" },
      { of: latest("step"), classes: "memory" },
    ],
    tick: (value) => seconds(value),
    show: ({ lastStep }) => shown(lastStep, SECONDS),
    note: ({ lastPredicted }) =>
      lastPredicted === null ? "no prediction" : `predicted ${seconds(lastPredicted)}`,
  },
  batch: {
    lines: [{ of: latest("running"), classes: "ink", isFilled: true }],
    most: latest("most"),
    tick: digits,
    show: ({ running }) => [digits(running), running === 1 ? "sequence" : "sequences"],
    note: ({ waiting, most }) => (waiting ? `${digits(waiting)} wait` : `of ${digits(most)}`),
  },
  pages: {
    lines: [{ of: latest("pages"), classes: "memory", isFilled: true }],
    tick: (value) => `${digits(100 * value)} %`,
    show: ({ pages }) => [digits(100 * pages), "%"],
    note: ({ pages, waste }) => (pages ? `${digits(100 * waste)} % empty` : "of the cache"),
  },
};

/** What changed between two of the server's events, as a sample; `before` may be null. */
function sampleOf(before, event, last) {
  const more = (name) => (before ? (event.counters[name] ?? 0) - (before.counters[name] ?? 0) : 0);
  const passed = before === null ? 0 : event.at - before.at;
  const begun = before ? event.first_tokens - before.first_tokens : 0;
  const first = begun ? (event.first_tokens_s - before.first_tokens_s) / begun : null;
  const step = ratio(more("decode_step_seconds"), more("decode_steps"));
  const isPredicted = "predicted_decode_step_seconds" in event.counters;
  const predicted = isPredicted
    ? ratio(more("predicted_decode_step_seconds"), more("decode_steps"))
    : null;
  return {
    t: performance.now() / 1000,
    rate: ratio(more("generated_tokens"), passed) ?? 0,
    first,
    step,
    predicted,
    running: event.running,
    waiting: event.waiting,
    most: event.max_seqs,
    pages: event.cache_used,
    waste: event.page_waste,
    answers: event.first_tokens,
    lastFirst: first ?? last?.lastFirst ?? null,
    lastStep: step ?? last?.lastStep ?? null,
    lastPredicted: predicted ?? last?.lastPredicted ?? null,
  };
}

export class Live {
  figures = null; // what the server said last
  #charts = [];
  #samples = [];
  #before = null; // the event behind the newest sample
  #share = null; // of the width, where the pointer is
  #box = document.getElementById("live");

  /** `page`: { heard(figures), lost(), key() }, of which the last waits for another key. */
  constructor(page) {
    this.page = page;
    for (const box of this.#box.querySelectorAll("[data-chart]"))
      this.#charts.push(new Chart(box, LOOKS[box.dataset.chart]));
    this.#box.addEventListener("pointermove", (event) => this.#point(event));
    this.#box.addEventListener("pointerleave", () => this.#point(null));
    addEventListener("resize", () => this.#draw());
  }

  /** Listens for ever. */
  async run() {
    for (let failed = 0; ; failed++) {
      try {
        for await (const event of events(await ask("console/events"))) {
          failed = 0;
          this.#hear(event);
        }
      } catch (error) {
        if (error instanceof RequestError && error.status === 401) {
          await this.page.key();
          continue;
        }
      }
      this.page.lost();
      const pause = RETRY_S[Math.min(failed, RETRY_S.length - 1)];
      await new Promise((done) => setTimeout(done, 1000 * pause));
    }
  }

  #hear(event) {
    this.figures = event;
    if (event.at !== this.#before?.at) {
      const sample = sampleOf(this.#before, event, this.#samples.at(-1));
      this.#samples = [...recent(this.#samples, sample.t), sample];
      this.#before = event;
    }
    this.page.heard(event);
    this.#draw();
  }

  #point(event) {
    const svg = event?.target.closest("[data-chart]")?.querySelector("svg");
    const box = svg?.getBoundingClientRect();
    this.#share = box ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : null;
    this.#draw();
  }

  #draw() {
    if (!this.#samples.length) return;
    const now = this.#samples.at(-1).t;
    const marked = this.#share === null ? null : nearest(this.#samples, this.#share, now);
    for (const chart of this.#charts) chart.update(this.#samples, now, marked);
  }
}
