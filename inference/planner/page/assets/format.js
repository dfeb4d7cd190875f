"use strict";
// Numbers as text: three digits and a unit.

const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

/** Three digits; whole and grouped from a thousand on. */
function digits(value) {
  const rounded = Number(value.toPrecision(3));
  if (!Number.isFinite(rounded)) return "∞";
  if (rounded >= 1000) return Math.round(value).toLocaleString("en-US");
  if (Number.isInteger(value)) return String(value);
  return rounded.toFixed(Math.max(0, Math.min(9, 2 - Math.floor(Math.log10(rounded)))));
}

/** [digits, unit] of a value in the largest unit it reaches. */
function scaled(value, units) {
  const rounded = Number(value.toPrecision(3));
  const [size, unit] = units.find(([least]) => rounded >= least) ?? units.at(-1);
  return [digits(value / size), unit];
}

const BYTES = [
  [1e12, "TB"],
  [1e9, "GB"],
  [1e6, "MB"],
  [1e3, "kB"],
  [1, "B"],
];
const SECONDS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];
const FLOPS = [
  [1e15, "PFLOP"],
  [1e12, "TFLOP"],
  [1e9, "GFLOP"],
  [1e6, "MFLOP"],
  [1, "FLOP"],
];
/** A price; '–' where there is none. */
const dollars = (value) =>
  value === null ? "–" : `$${value < 1000 ? value.toPrecision(3) : digits(value)}`;

const said = (value, units) => scaled(value, units).join(" ");
const bytes = (value) => said(value, BYTES);
const seconds = (value) => (value === 0 ? "0 s" : said(value, SECONDS));
