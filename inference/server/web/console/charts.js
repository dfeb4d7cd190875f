// Small charts of the last minute, drawn as SVG; the pointer over one of them reads all.

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_S = 60;
const TOP = 6; // pixels above the highest value
const EDGE = 3; // and beside the newest

function draw(svg, name, attributes) {
  const found = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) found.setAttribute(key, value);
  svg.append(found);
  return found;
}

/** The least of 1, 2 and 5 times powers of ten that is not below a value. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= value * 0.999);
}

/** Points of a series without its gaps, as runs. */
function runs(samples, of) {
  const found = [[]];
  for (const sample of samples) {
    const value = of(sample);
    if (value === null) found.push([]);
    else found.at(-1).push([sample.t, value]);
  }
  return found.filter((run) => run.length);
}

export class Chart {
  #svg;
  #value;
  #note;
  #look;

  /**
   * `look`: { lines: [{ of, classes, isFilled, isScattered }], show(sample), note(sample), tick(value),
   * most(sample) }; `of` gives a sample's number, or null where it has none; `most` the end of the
   * axis, which is else a round number above all.
   */
  constructor(box, look) {
    this.#svg = box.querySelector("svg");
    this.#value = box.querySelector("data");
    this.#note = box.querySelector("small");
    this.#look = look;
  }

  /** `marked`: the sample under the pointer, or null. */
  update(samples, now, marked) {
    const last = samples.at(-1);
    const sample = marked ?? last;
    if (!sample) return;
    const [number, unit] = this.#look.show(sample);
    this.#value.replaceChildren(number);
    if (unit) this.#value.append(Object.assign(document.createElement("span"), { textContent: ` ${unit}` }));
    this.#note.textContent = marked ? `${Math.round(now - marked.t)} s ago` : this.#look.note(last);
    this.#svg.setAttribute("data-points", samples.length);
    this.#draw(samples, now, marked);
  }

  #draw(samples, now, marked) {
    const svg = this.#svg;
    const { clientWidth: width, clientHeight: height } = svg;
    svg.replaceChildren();
    const values = this.#look.lines.flatMap(({ of }) => samples.map(of)).filter((v) => v !== null);
    const highest = Math.max(0, ...values);
    const most = this.#look.most?.(samples.at(-1)) || (highest ? roundUp(highest) : 1);
    const x = (t) => (width - EDGE) * (1 - (now - t) / WINDOW_S);
    const y = (value) => height - 1 - (value / most) * (height - 1 - TOP);
    draw(svg, "line", { x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5, class: "grid" });
    draw(svg, "line", { x1: 0, x2: width, y1: TOP - 0.5, y2: TOP - 0.5, class: "grid" });
    for (const line of this.#look.lines) this.#drawLine(line, samples, x, y);
    const label = draw(svg, "text", { x: 0, y: TOP + 11, class: "halo" });
    label.textContent = highest ? this.#look.tick(most) : "";
    if (!marked) return;
    draw(svg, "line", { x1: x(marked.t), x2: x(marked.t), y1: TOP, y2: height, class: "thin" });
    for (const { of, classes } of this.#look.lines) {
      if (of(marked) !== null)
        draw(svg, "circle", { cx: x(marked.t), cy: y(of(marked)), r: 3, class: `end ${classes}` });
    }
  }

  #drawLine({ of, classes, isFilled, isScattered }, samples, x, y) {
    for (const run of runs(samples, of)) {
      const points = run.map(([t, value]) => `${x(t).toFixed(1)} ${y(value).toFixed(1)}`);
      const path = `M${points.join("L")}`;
      if (isFilled) {
        const close = `L${x(run.at(-1)[0]).toFixed(1)} ${y(0)}L${x(run[0][0]).toFixed(1)} ${y(0)}Z`;
        draw(this.#svg, "path", { d: path + close, class: `area ${classes}` });
      }
      if (run.length > 1 && !isScattered)
        draw(this.#svg, "path", { d: path, class: `line ${classes}` });
      else {
        for (const [t, value] of run)
          draw(this.#svg, "circle", { cx: x(t), cy: y(value), r: 2.5, class: `end ${classes}` });
      }
    }
  }
}

/** Samples of the last minute, the newest last. */
export const recent = (samples, now) => samples.filter(({ t }) => now - t <= WINDOW_S);

/** The sample nearest to a share of the width. */
export function nearest(samples, share, now) {
  const t = now - (1 - share) * WINDOW_S;
  return samples.reduce(
    (best, each) => (Math.abs(each.t - t) < Math.abs(best.t - t) ? each : best),
    samples[0],
  );
}
