"use strict";
// Pictures of a plan as SVG text; the page puts it into its elements.

// --- scales --------------------------------------------------------------------------------------

const linear = (from, to, low, high) => (value) =>
  low + ((value - from) / (to - from)) * (high - low);
const logarithmic = (from, to, low, high) => {
  const inner = linear(Math.log(from), Math.log(to), low, high);
  return (value) => inner(Math.log(value));
};

/** Round numbers from 0 to `most`, about `count` of them. */
function roundTicks(most, count) {
  const rough = most / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** Powers of `base` within the ends. */
function powers(base, from, to) {
  const first = Math.ceil(Math.log(from) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(to) / Math.log(base) + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => base ** (first + i));
}

/** 1, 2 and 5 times powers of ten within the ends; only the powers where they suffice. */
function decimals(from, to) {
  const tens = powers(10, from, to);
  if (tens.length > 1) return tens;
  return powers(10, from / 10, to)
    .flatMap((ten) => [ten, 2 * ten, 5 * ten])
    .filter((tick) => tick >= from && tick <= to);
}

/** Every n-th, so that at most `most` remain. */
const thinned = (list, most) => list.filter((_, i) => i % Math.ceil(list.length / most) === 0);

const text = (x, y, content, classes = "") =>
  `<text x="${x}" y="${y}" class="${classes}">${escaped(content)}</text>`;
const line = (x1, y1, x2, y2, classes) =>
  `<line x1="${x1}" y1="${y1}" x2="${x2}" y2="${y2}" class="${classes}"/>`;
const bar = (x, y, width, height, classes, more = "") =>
  `<rect x="${x}" y="${y}" width="${Math.max(0, width)}" height="${height}" class="${classes}" ${more}/>`;
const path = (points, classes, more = "") =>
  `<path d="M${points.map(([x, y]) => `${x.toFixed(2)} ${y.toFixed(2)}`).join("L")}" class="${classes}" ${more}/>`;

// --- memory --------------------------------------------------------------------------------------

/** What the fullest chip holds: weights, a slice of cache a sequence, what is left. */
function drawMemory(p, width) {
  const top = 20,
    height = 34,
    used = p.chip_weight_bytes + p.chip_cache_bytes;
  const most = Math.max(Number.isFinite(p.capacity_bytes) ? p.capacity_bytes : 0, used);
  const x = linear(0, most, 0, width - 1),
    weights = x(p.chip_weight_bytes),
    filled = x(used);
  const limit = Number.isFinite(p.capacity_bytes) ? x(p.capacity_bytes) : null;
  let found = bar(0, top, limit ?? filled, height, "fill empty");
  found += bar(0, top, weights, height, "fill weights", 'data-part="weights"');
  found += bar(weights, top, filled - weights, height, "fill cache", 'data-part="cache"');
  const slice = (filled - weights) / p.on_fullest,
    fit = p.largest_batch / p.deployment.numGroups;
  if (slice >= 3) {
    for (let n = 1; n < p.on_fullest; n++) {
      const at = weights + n * slice;
      found += line(at, top, at, top + height, "slices");
    }
    for (let n = p.on_fullest + 1; slice >= 6 && n <= fit; n++) {
      const at = weights + n * slice;
      found += line(at, top + 4, at, top + height - 4, "slices free");
    }
  }
  if (limit !== null) {
    for (let at = limit + 4; at < filled; at += 7) {
      found += line(at, top + height, Math.min(at + 10, filled), top, "hatch");
    }
    found += line(limit, top - 6, limit, top + height + 6, "rule");
    const label = used > p.capacity_bytes ? "capacity, exceeded" : "capacity";
    const end = limit > 120;
    found += text(
      end ? limit - 6 : limit + 6,
      top - 7,
      label,
      `${end ? "end" : ""} ${used > p.capacity_bytes ? "limit-text" : ""}`,
    );
  }
  const [, unit] = scaled(most, BYTES),
    size = BYTES.find((pair) => pair[1] === unit)[0];
  for (const tick of roundTicks(most / size, width < 500 ? 4 : 8)) {
    const at = x(tick * size),
      classes = at > width - 16 ? "end" : at < 10 ? "" : "middle";
    found += line(at, top + height, at, top + height + 5, "thin");
    found += text(
      at,
      top + height + 19,
      tick === 0 ? `0 ${unit}` : String(Number(tick.toFixed(6))),
      classes,
    );
  }
  return { height: top + height + 24, markup: found };
}

// --- roofline ------------------------------------------------------------------------------------

/** A chip's part of each operation that computes: where it lies under the roof. */
function dots(p) {
  const d = p.deployment,
    bandwidth = bandwidthOf(d);
  return ["decode", "prefill"].flatMap((phase) => {
    const parts = p[`${phase}_operations`].map((found) => {
      const done = perChip(d, found),
        rate = rateFor(d, found);
      const time = Math.max(done.bytes / bandwidth, done.flops / rate);
      return { phase, found, time, intensity: done.flops / done.bytes, rate };
    });
    const whole = sum(parts, (part) => part.time);
    return parts
      .filter((part) => part.found.flops > 0)
      .map((part) => ({
        ...part,
        share: part.time / whole,
        reached: Math.min(part.rate, part.intensity * bandwidth),
        bound: part.intensity * bandwidth < part.rate ? "memory" : "compute",
      }));
  });
}

const typeName = (name) => ({ bfloat16: "bf16", float32: "fp32" })[name] ?? name;
const shortName = (name) =>
  name
    .replace(/^(attention|ffn)\./, "")
    .replaceAll("_", "-")
    .replaceAll(".", " ");

function drawRoofline(p, width) {
  const d = p.deployment,
    bandwidth = bandwidthOf(d),
    found = dots(p);
  const left = 44,
    right = width - 4,
    top = 8,
    bottom = Math.round(Math.max(300, width * 0.62));
  const types = [...new Set([d.weights.compute, d.rest.compute])];
  const roofs = [];
  for (const type of types) {
    const rate = rateOf(d.hardware, type) * d.hardware.rate_share;
    const same = roofs.find((roof) => roof.rate === rate);
    if (!Number.isFinite(rate)) continue;
    if (same) same.types.push(type);
    else roofs.push({ rate, types: [type] });
  }
  const peak = Math.max(...roofs.map((roof) => roof.rate), ...found.map((dot) => dot.reached));
  const from = Math.min(0.3, ...found.map((dot) => dot.intensity / 2));
  const to = Math.max(2e4, (4 * peak) / bandwidth, ...found.map((dot) => dot.intensity * 3));
  const x = logarithmic(from, to, left, right);
  const y = logarithmic(from * bandwidth, peak * 9, bottom, top);
  const roofAt = (at) => {
    // pixels of the highest roof at a pixel of x
    const intensity = from * (to / from) ** ((at - left) / (right - left));
    return y(Math.min(peak, intensity * bandwidth));
  };
  let markup = "",
    texts = "";
  for (const tick of powers(10, from, to)) {
    markup += line(x(tick), top, x(tick), bottom, "grid");
    markup += text(x(tick), bottom + 17, digits(tick), "middle");
  }
  for (const tick of powers(10, from * bandwidth, peak * 9)) {
    markup += line(left, y(tick), right, y(tick), "grid");
    const [amount, unit] = scaled(tick, FLOPS);
    markup += text(left - 6, y(tick) + 4, `${amount} ${unit[0]}`, "end");
  }
  markup +=
    text(right, bottom + 34, "FLOPs a byte", "end") + text(left + 5, top + 9, "FLOP/s", "halo");
  const taken = [[left, top - 4, left + 5 + widthOf("FLOP/s"), top + 12]];
  const ridge = peak / bandwidth,
    isKnown = roofs.length > 0; // else the rate of no type is
  if (isKnown) markup += line(x(ridge), y(peak), x(ridge), bottom, "thin dashed");
  markup += path(
    [
      [x(from), y(from * bandwidth)],
      [x(ridge), y(peak)],
    ],
    "line memory",
  );
  roofs.forEach((roof) => {
    const knee = x(roof.rate / bandwidth);
    markup += path(
      [
        [knee, y(roof.rate)],
        [right, y(roof.rate)],
      ],
      "line compute",
      roof.rate === peak ? "" : 'stroke-dasharray="1 5"',
    );
    const label = `${roof.types.map(typeName).join(", ")} ${said(roof.rate, FLOPS)}/s`;
    const top = y(roof.rate) + (roof.rate === peak ? -16 : 18);
    texts += text(right, top, label, "end halo");
    taken.push([right - widthOf(label), top - 11, right, top + 3]);
  });
  const sides = [
    ["waits for memory", x(ridge) - 8, "end"],
    ["waits for arithmetic", x(ridge) + 8, ""],
    [`ridge ${digits(ridge)}`, x(ridge) + 8, ""],
  ];
  for (const [label, at, side] of isKnown ? sides : []) {
    const up = label.startsWith("ridge") ? 24 : 8,
      size = widthOf(label);
    texts += text(at, bottom - up, label, `${side} halo ${up === 24 ? "strong" : ""}`);
    taken.push([side ? at - size : at, bottom - up - 11, side ? at : at + size, bottom - up + 3]);
  }
  const radius = (dot) => 3.5 + 8 * Math.sqrt(dot.share);
  let circles = "";
  for (const dot of [...found].sort((a, b) => b.share - a.share)) {
    const cx = x(dot.intensity),
      cy = y(dot.reached),
      about =
        `${dot.phase} ${dot.found.name}: ${said(dot.intensity, [[1, ""]]).trim()} FLOPs a byte, ` +
        `${Math.round(100 * dot.share)} % of the step, waits for ${dot.bound}`;
    circles +=
      `<circle cx="${cx.toFixed(2)}" cy="${cy.toFixed(2)}" r="${radius(dot).toFixed(2)}" ` +
      `class="dot ${dot.phase} ${dot.bound}"><title>${escaped(about)}</title></circle>`;
    taken.push([cx - radius(dot), cy - radius(dot), cx + radius(dot), cy + radius(dot)]);
  }
  const named = labelled(clustered(found, x, y, radius, (right - left) / 12), taken, {
    left,
    right,
    top,
    bottom,
    roofAt,
  });
  return { height: bottom + 40, markup: markup + circles + named.leaders + texts + named.texts };
}

/** Pixels of a label of 12 px, by letters of three widths: fonts differ, and none is measured. */
function widthOf(label) {
  const letter = (each) => (/[mwMW%]/.test(each) ? 11.8 : /[fijlrtI.,:' ]/.test(each) ? 4.8 : 7.7);
  return [...label].reduce((sum, each) => sum + letter(each), 0);
}

/** Dots of one phase that lie together share a label. */
function clustered(found, x, y, radius, longest) {
  const groups = [];
  for (const dot of [...found].sort((a, b) => a.intensity - b.intensity)) {
    const cx = x(dot.intensity),
      cy = y(dot.reached);
    const reach = found.length > 20 ? 30 : 15;
    const near = groups.find(
      (g) => g.phase === dot.phase && Math.hypot(g.cx - cx, g.cy - cy) < reach,
    );
    const name = shortName(dot.found.name);
    if (near) {
      near.members.push([dot.share, name]);
      Object.assign(near, { cx, cy, r: Math.max(near.r, radius(dot)) });
    } else groups.push({ phase: dot.phase, cx, cy, r: radius(dot), members: [[dot.share, name]] });
  }
  for (const group of groups) {
    const names = group.members.sort(([a], [b]) => b - a).map(([, name]) => name);
    const different = [...new Set(names)];
    let kept = different.length;
    while (kept > 1 && different.slice(0, kept).join(", ").length > longest) kept--;
    const more = different.length - kept;
    group.label = different.slice(0, kept).join(", ") + (more ? `, ${more} more` : "");
  }
  return groups;
}

/** Labels with leaders: decode above the roof, prefill below it, none over another. */
function labelled(groups, taken, { left, right, top, bottom, roofAt }) {
  const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
  let leaders = "",
    texts = "";
  for (const group of groups) {
    const { label } = group,
      size = widthOf(label),
      up = group.phase === "decode";
    let best = null;
    for (let n = 0; n < 60 && !best; n++) {
      const shift = group.r + 9 + 8 * (n % 20),
        aside = n < 20 ? 4 : n < 40 ? 30 : 70;
      const baseline = up ? group.cy - shift + 4 : group.cy + shift + 4;
      let start = up ? group.cx - aside - size : group.cx + aside;
      start = Math.min(Math.max(start, left + 4), right - size - 2);
      const box = [start, baseline - 11, start + size, baseline + 3];
      const clear = up ? box[3] < roofAt(box[2]) - 3 : box[1] > roofAt(box[0]) + 4;
      const inside = box[1] > top && box[3] < bottom - 2;
      if (inside && clear && !taken.some((other) => meets(box, other))) best = { box, baseline };
    }
    if (!best) continue;
    const { box, baseline } = best,
      middle = Math.min(Math.max(group.cx, box[0] + 4), box[2] - 4);
    taken.push(box);
    const edge = up ? baseline + 4 : baseline - 11;
    if (Math.abs(edge - group.cy) > group.r + 6) {
      leaders += line(middle, edge, group.cx, group.cy + (up ? -group.r : group.r), "thin");
    }
    texts += text(box[0].toFixed(1), baseline.toFixed(1), label, "strong halo");
  }
  return { leaders, texts };
}

// --- batch ---------------------------------------------------------------------------------------

/** Batches to draw: each up to 8, then about six a doubling. */
function batchLadder(most) {
  const found = new Set([1, 2, 3, 4, 5, 6, 7, 8]);
  for (let value = 8; value < most; value *= 1.122) found.add(Math.round(value));
  return [...found, most].filter((batch) => batch <= most);
}

/** Throughput and the time of a step over the batch, one above the other. */
function drawCurves(p, points, width) {
  const left = 52,
    right = width - 6,
    most = points.at(-1).batch;
  const x = logarithmic(1, most, left, right),
    limit = p.largest_batch;
  const panels = [
    { key: "output_tok_s", title: "tokens a second", said: (v) => digits(v), top: 22 },
    { key: "step_s", title: "decode step", said: seconds, top: 200 },
  ];
  const size = 132,
    bottom = panels[1].top + size;
  let markup = "";
  const edge = limit >= 1 ? x(Math.min(limit, most)) : left;
  if (limit < most)
    markup += bar(edge, panels[0].top, right - edge, bottom - panels[0].top, "fill beyond");
  for (const tick of thinned(powers(2, 1, most), width < 420 ? 5 : 8)) {
    markup +=
      `<g class="tick" data-axis="batch" data-value="${tick}">` +
      line(x(tick), bottom, x(tick), bottom + 5, "thin") +
      text(x(tick), bottom + 19, digits(tick), x(tick) > right - 14 ? "end" : "middle") +
      "</g>";
  }
  markup += text(right, bottom + 35, "requests at once", "end");
  for (const panel of panels) {
    const values = points.map((point) => point[panel.key]);
    const low = Math.min(...values),
      high = Math.max(...values);
    const y = logarithmic(low / 1.3, high * 1.3, panel.top + size, panel.top);
    panel.y = y;
    for (const tick of thinned(decimals(low / 1.3, high * 1.3), 5)) {
      markup +=
        `<g class="tick" data-axis="${panel.key}" data-value="${tick}">` +
        line(left, y(tick), right, y(tick), "grid") +
        text(left - 6, y(tick) + 4, panel.said(tick), "end") +
        "</g>";
    }
    markup += text(left, panel.top - 8, panel.title, "strong");
    const pixels = points.map((point) => [x(point.batch), y(point[panel.key])]);
    const held = points.filter((point) => point.batch <= limit).length;
    if (held > 1) markup += path(pixels.slice(0, held), "line ink", `data-curve="${panel.key}"`);
    if (held < points.length) {
      markup += path(
        pixels.slice(Math.max(0, held - 1)),
        "line beyond",
        held > 1 ? "" : `data-curve="${panel.key}"`,
      );
    }
    const cx = x(p.batch),
      cy = y(p[panel.key]),
      label = panel.said(p[panel.key]);
    const free = p.batch <= limit && limit < most ? edge : right;
    const rate = panel.key === "output_tok_s",
      room = 7 * label.length + 14;
    const after = rate ? cx + room < free : cx - room < left; // where the curve is not
    markup += `<circle class="point" data-point="${panel.key}" cx="${cx.toFixed(2)}" cy="${cy.toFixed(2)}" r="5.5"/>`;
    markup += text(
      after ? cx + 8 : cx - 6,
      cy + (rate && after ? 18 : -12),
      label,
      `strong halo ${after ? "" : "end"}`,
    );
  }
  if (limit < most) {
    const label = limit >= 1 ? `${digits(limit)} fit` : "nothing fits",
      end = edge > left + 90;
    markup += line(edge, panels[0].top, edge, bottom, "limit");
    markup += text(
      end ? edge - 6 : edge + 6,
      bottom - 8,
      label,
      `halo limit-text ${end ? "end" : ""}`,
    );
  }
  return { height: bottom + 40, markup, x, left, right, bottom, top: panels[0].top, panels };
}

// --- one request ---------------------------------------------------------------------------------

/** A prompt read, then tokens one step after the other; below, what a step is made of. */
function drawTimeline(p, newTokens, width) {
  const top = 22,
    height = 26,
    whole = p.request_s ?? p.ttft_s;
  const x = linear(0, whole, 0, width - 1),
    first = x(p.ttft_s);
  let markup = bar(0, top, first, height, `fill ${p.prefill.bound}`, 'data-part="prefill"');
  markup += bar(
    first + 1,
    top,
    width - 2 - first,
    newTokens ? height : 0,
    `fill ${p.bound}`,
    'data-part="decode"',
  );
  const { steps } = p,
    gap = (width - 1 - first) / Math.max(1, steps),
    answer = x(p.answer_s),
    thinks = answer > first;
  if (gap >= 3) {
    for (let n = 1; n < steps; n++) {
      markup += line(first + n * gap, top, first + n * gap, top + height, "slices");
    }
  }
  const firstLabel = `first token ${seconds(p.ttft_s)}`,
    lastLabel = `token ${digits(newTokens)} ${seconds(whole)}`;
  const beside = first + 6.6 * (firstLabel.length + lastLabel.length) < width || !newTokens;
  markup += line(first, top - 5, first, top + height + 5, "thin");
  markup +=
    first > width - 7 * firstLabel.length
      ? text(first - 6, top - 7, firstLabel, "end strong")
      : text(first + 6, top - 7, firstLabel, "strong");
  if (newTokens) {
    markup += beside
      ? text(width - 1, top - 7, lastLabel, "end strong")
      : text(width - 1, top + height + 17, lastLabel, "end strong");
  }
  if (first > 60) markup += text(0, top + height + 17, "prefill");
  if (thinks) markup += line(answer, top - 5, answer, top + height + 5, "thin");
  if (newTokens && (thinks ? answer : width) - first > (thinks ? 70 : 170))
    markup += text(first + 6, top + height + 17, thinks ? "thought" : "decode");
  if (thinks && width - answer > 200) markup += text(answer + 6, top + height + 17, "answer");
  const narrow = width < 620,
    half = narrow ? width : (width - 48) / 2;
  let y = top + height + 50;
  const phases = [
    ["prefill", p.prefill, 0, p.prefill.total_s],
    ["decode", p.decode, p.draft_s, p.step_s],
  ];
  let tallest = 0;
  phases.forEach(([name, time, drafts, total], index) => {
    const left = narrow ? 0 : index * (half + 48);
    const start = narrow ? y + index * (tallest + 22) : y;
    const parts = [
      ["memory", "memory", time.memory_s],
      ["compute", "arithmetic", time.compute_s],
      ["collectives", "exchange", time.collective_s],
      ["overhead", "overhead", time.overhead_s],
      ["drafts", "drafts", drafts],
    ].filter(([key, , value]) => value > 0 || key === "memory" || key === "compute");
    const long = linear(0, Math.max(total, ...parts.map((part) => part[2])), 0, half - 82 - 70);
    markup += text(
      left,
      start,
      `${name === "prefill" ? "A prefill step" : "A decode step"}: ${seconds(total)}`,
      "strong",
    );
    parts.forEach(([key, label, value], row) => {
      const at = start + 10 + row * 20;
      markup += text(left, at + 12, label);
      markup += bar(
        left + 76,
        at + 2,
        Math.max(1, long(value)),
        12,
        `fill ${key}`,
        `data-time="${name}.${key}"`,
      );
      markup += text(left + 76 + Math.max(1, long(value)) + 7, at + 12, seconds(value));
    });
    tallest = Math.max(tallest, 10 + parts.length * 20);
  });
  return { height: y + (narrow ? 2 * tallest + 22 : tallest) + 4, markup };
}
