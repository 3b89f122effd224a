// What the page's other scripts share: the data, elements, words, colours, the tip. All run in one function.

// Everything shown comes from this JSON, and goes into the page as text nodes and attributes of our own only.
const data = JSON.parse(document.getElementById("data").textContent);
const { run, parts } = data;
const wall = Math.max(run.wall_s, 1e-6);
const byId = (id) => document.getElementById(id);
const redraws = [];
const sections = [];

// -- elements and words -----------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined).map((one) => (one instanceof Node ? one : String(one))));
  return made;
}

function svg(tag, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const digits = (value, num = 3) => String(Number(value.toPrecision(num)));
const words = (name) => String(name).replaceAll("_", " ");
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function time(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (Math.abs(seconds) < 1e-9) return "0 s";
  if (seconds < 0.9995) return `${digits(1000 * seconds)} ms`;
  if (seconds < 90) return `${digits(seconds)} s`;
  if (seconds < 5400) return `${digits(seconds / 60)} min`;
  if (seconds < 172800) return `${digits(seconds / 3600)} h`;
  return `${digits(seconds / 86400)} days`;
}

/** A moment since the begin, as fine as a step between two of them needs. */
function moment(seconds, step = wall / 1000) {
  if (wall < 120) return `${seconds.toFixed(step < 0.001 ? 4 : step < 0.1 ? 2 : 1)} s`;
  const whole = Math.floor(seconds);
  const pad = (number) => String(number).padStart(2, "0");
  const days = Math.floor(whole / 86400);
  const rest = step < 1 ? (seconds - whole).toFixed(step < 0.01 ? 3 : 1).slice(1) : "";
  return `${days ? `${days} d ` : ""}${pad(Math.floor(whole / 3600) % 24)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}${rest}`;
}

const date = (seconds) => new Date(run.began_ms + 1000 * seconds).toISOString().replace("T", " ").slice(0, 19) + " UTC";

function bytes(number) {
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
  let place = 0;
  while (number >= 1000 && place < units.length - 1) { number /= 1000; place += 1; }
  return `${digits(number)} ${units[place]}`;
}

const DONE = {
  rerun_step: "step run again", restart_in_process: "restarted in process", restart_workers: "workers restarted",
  replace_node: "node replaced", requeue_job: "left to the scheduler", stop: "stopped",
};
const whoOf = (one) => [one.rank !== null && one.rank !== undefined ? `rank ${one.rank}` : "", one.node].filter(Boolean).join(" on ");

function section(id, title, label, ...children) {
  const made = el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), ...children);
  sections.push([id, label]);
  return made;
}

// -- colours: each part has one, and a pattern, so that neither alone is needed ------------------------------------

const PATTERNS = { straggler: "rows", redone: "slash", detection: "dots", rendezvous: "back", load: "columns", restart: "cross", idle: "slash", queued: "columns", unobserved: "cross" };
const ratio = Math.max(1, Math.min(3, window.devicePixelRatio || 1));
let tiles = [];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawTile(part) {
  const size = Math.round(8 * ratio);
  const canvas = el("canvas", { width: size, height: size });
  const c = canvas.getContext("2d");
  c.fillStyle = color(`--p-${part.name}`);
  c.fillRect(0, 0, size, size);
  c.strokeStyle = c.fillStyle = color("--hatch");
  c.lineWidth = 1.5 * ratio;
  const line = (x0, y0, x1, y1) => { c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke(); };
  const kind = PATTERNS[part.name];
  if (kind === "rows") line(0, size / 2, size, size / 2);
  if (kind === "columns") line(size / 2, 0, size / 2, size);
  if (kind === "dots") { c.beginPath(); c.arc(size / 2, size / 2, 1.7 * ratio, 0, 7); c.fill(); }
  for (const shift of [-size, 0, size]) {
    if (kind === "slash" || kind === "cross") line(shift - 1, size + 1, shift + size + 1, -1);
    if (kind === "back" || kind === "cross") line(shift - 1, -1, shift + size + 1, size + 1);
  }
  return { canvas, url: `url(${canvas.toDataURL()})`, pattern: null };
}

function swatch(part, attributes = {}) {
  return el("span", { "data-part": part, ...attributes });
}

function paintSwatches(root = document) {
  for (const one of root.querySelectorAll("[data-part]")) {
    one.style.backgroundImage = tiles[Number(one.dataset.part)]?.url || "none";
    one.style.backgroundSize = "8px 8px";
  }
}

const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = "auto";
let isPrinting = false;
try { theme = localStorage.getItem("outlast-report-theme") || "auto"; } catch { /* a browser may keep nothing for files */ }

function applyTheme() {
  const dark = !isPrinting && (theme === "dark" || (theme === "auto" && prefersDark.matches));
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").textContent = `Theme: ${theme}`;
  tiles = parts.map(drawTile);
  paintSwatches();
  redraws.forEach((redraw) => redraw());
}

byId("theme").addEventListener("click", () => {
  theme = { auto: "dark", dark: "light", light: "auto" }[theme] || "auto";
  try { localStorage.setItem("outlast-report-theme", theme); } catch { /* as above */ }
  applyTheme();
});
prefersDark.addEventListener("change", applyTheme);
window.addEventListener("beforeprint", () => { isPrinting = true; applyTheme(); });
window.addEventListener("afterprint", () => { isPrinting = false; applyTheme(); });

// -- the tip next to the pointer -----------------------------------------------------------------------------------

const tip = byId("tip");
function showTip(x, y, lines) {
  tip.replaceChildren(...lines.filter(Boolean).map((line) => el("div", {}, line)));
  tip.hidden = false;
  const { offsetWidth, offsetHeight } = tip;
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + offsetHeight > innerHeight ? Math.max(4, y - offsetHeight - 10) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };

function fitCanvas(canvas, width, height) {
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.height = `${height}px`;
  const c = canvas.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  c.textBaseline = "middle";
  return c;
}

function ticks(from, to, num, isTime = true) {
  const rough = (to - from) / Math.max(1, num);
  const steps = wall < 120 || !isTime ? [] : [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = steps.find((one) => one >= rough && rough >= 0.5) || [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * 0.999) || rough;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step * 1e-6 && found.length < 100; at += step) found.push(Math.abs(at) < step * 1e-6 ? 0 : at);
  return [found, step];
}

/** First place in a sorted column whose value is above a limit. */
function firstAbove(column, limit) {
  let low = 0;
  let high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

function shorten(c, text, width) {
  if (c.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && c.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
