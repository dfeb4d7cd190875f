"use strict";
// What a request's seconds buy: samples that decode together, or one thought.

const MOST_SAMPLES = 1024;

/** Requests of more and more samples, and of one sample that thinks for as many tokens. */
function tradeOf(catalog, input) {
  const most = Math.max(64, Math.min(MOST_SAMPLES, 2 ** Math.ceil(Math.log2(input.samples) + 1)));
  const length = newTokensOf(input),
    room = catalog.models[input.model].max_context - input.context;
  const at = (samples) => requestCost(catalog, { ...input, samples });
  const thoughts = ladder(Math.max(1, Math.min(most, room / length))).map((times) =>
    requestCost(catalog, {
      ...input,
      samples: 1,
      thinking_tokens: Math.floor(times * length) - input.new_tokens,
    }),
  );
  return { here: at(input.samples), samples: ladder(most).map(at), thoughts };
}

/** From how many samples on a step reads more of caches than of all else; null: none of these. */
const mostlyCache = ({ samples }) => samples.find((cost) => cost.cache_share > 0.5) ?? null;

/** Where more samples begin to take more seconds. */
function turnOf(costs) {
  const turn = mostlyCache(costs);
  if (!turn) return "steps mostly read weights";
  return `from ${digits(turn.samples)} sample${turn.samples > 1 ? "s" : ""} on (dashed), steps mostly read caches`;
}

/** Seconds of a request over the tokens that it samples, side by side or one after the other. */
function drawTrade(input, costs, width) {
  const { here, samples, thoughts } = costs,
    left = 52,
    right = width - 6,
    top = 22,
    bottom = 190;
  const all = [...samples, ...thoughts, here];
  const span = (key) => [Math.min(...all.map((c) => c[key])), Math.max(...all.map((c) => c[key]))];
  const [fewest, most] = span("tokens"),
    [low, high] = span("seconds");
  const x = logarithmic(fewest, Math.max(most, 2 * fewest), left, right);
  const y = logarithmic(low / 1.3, high * 1.3, bottom, top);
  let markup = text(left, top - 8, "seconds of a request", "strong");
  for (const tick of thinned(decimals(low / 1.3, high * 1.3), 5)) {
    markup += line(left, y(tick), right, y(tick), "grid");
    markup += text(left - 6, y(tick) + 4, seconds(tick), "end");
  }
  const marks = samples.filter(({ samples: k }) => Number.isInteger(Math.log2(k)));
  for (const cost of thinned(marks, width < 420 ? 4 : 8)) {
    const at = x(cost.tokens),
      label = `${digits(cost.tokens)}`;
    markup += line(at, bottom, at, bottom + 5, "thin");
    markup += text(at, bottom + 19, label, at > right - 20 ? "end" : "middle");
  }
  markup += text(right, bottom + 35, "tokens sampled for a request", "end");
  const pixels = (list) => list.map((cost) => [x(cost.tokens), y(cost.seconds)]);
  const fits = (cost) => cost.largest_batch >= input.batch;
  for (const [list, name] of [
    [thoughts, "thought"],
    [samples, "samples"],
  ]) {
    const count = list.filter(fits).length;
    if (count > 1) markup += path(pixels(list.slice(0, count)), `line ${name}`);
    if (count < list.length) markup += path(pixels(list.slice(Math.max(0, count - 1))), "line beyond");
  }
  const turn = mostlyCache(costs);
  if (turn) markup += line(x(turn.tokens), y(turn.seconds), x(turn.tokens), bottom, "thin dashed");
  markup += `<circle class="point" data-point="trade" cx="${x(here.tokens).toFixed(2)}" cy="${y(here.seconds).toFixed(2)}" r="5.5"/>`;
  return { height: bottom + 40, markup };
}
