// -- the timeline --------------------------------------------------------------------------------------------------

const HEAD = 78;
const NODE_ROW = 22;
const RANK_ROW = 16;
const nodes = data.nodes.names.map((name) => ({ name, spans: [], marks: [], open: false, ranks: null }));
data.nodes.node.forEach((node, place) => nodes[node].spans.push({ cycle: data.nodes.cycle[place], layout: data.nodes.layout[place], start: data.nodes.start[place], end: data.nodes.end[place] }));
const nodeOf = new Map(nodes.map((node) => [node.name, node]));
const entries = [
  ...data.incidents.map((one) => ({ ...one, id: `incident-${one.index}`, number: one.index + 1, isWarning: false })),
  ...data.warned.map((one, place) => ({ ...one, id: `warning-${place}`, number: `w${place + 1}`, isWarning: true })),
];
const incidents = entries.filter((one) => !one.isWarning);
entries.forEach((one) => nodeOf.get(one.node)?.marks.push(one));

function ranksOf(layout) {
  const { ranks } = data.nodes.layouts[layout];
  return ranks.length === 2 && ranks[1] < 0 ? Array.from({ length: -ranks[1] }, (_, place) => ranks[0] + place) : ranks;
}
const layoutRanks = data.nodes.layouts.map((_, layout) => new Set(ranksOf(layout)));

const timeline = (() => {
  const view = { from: 0, to: wall };
  let rows = [];
  let offsets = [0];
  let hits = [];
  let strips = new Map();
  let drag = null;
  let cursor = -1;
  let picked = -1;
  let isDue = false;
  const canvas = el("canvas", { tabindex: 0, role: "application", "aria-label": "Timeline of nodes and ranks", "aria-describedby": "timeline-hint", id: "timeline-canvas" });
  const space = el("div", { class: "space" }, canvas);
  const scroller = el("div", { class: "scroller" }, space);
  const range = el("output", { class: "num soft grow", id: "range", "aria-live": "polite" });

  function layRows() {
    rows = [];
    for (const node of nodes) {
      rows.push({ node, rank: null });
      if (!node.open) continue;
      node.ranks ||= [...new Set(node.spans.flatMap((one) => [...layoutRanks[one.layout]]))].sort((a, b) => a - b);
      for (const rank of node.ranks) rows.push({ node, rank });
    }
    offsets = [0];
    for (const row of rows) offsets.push(offsets.at(-1) + (row.rank === null ? NODE_ROW : RANK_ROW));
    schedule();
  }

  const gutter = () => (scroller.clientWidth < 560 ? 84 : 150);
  const plotWidth = () => Math.max(40, scroller.clientWidth - gutter() - 8);
  const xOf = (at) => gutter() + ((at - view.from) / (view.to - view.from)) * plotWidth();
  const timeAt = (x) => view.from + ((x - gutter()) / plotWidth()) * (view.to - view.from);

  function setView(from, to) {
    const least = Math.max(wall / 20000, Math.min(wall, 0.002));
    const span = Math.min(wall, Math.max(least, to - from));
    const middle = (from + to) / 2;
    view.from = Math.min(Math.max(0, Math.abs(to - from - span) < 1e-9 ? from : middle - span / 2), wall - span);
    view.to = view.from + span;
    strips = new Map();
    schedule();
  }
  const zoom = (factor, at = (view.from + view.to) / 2) => setView(at - (at - view.from) * factor, at + (view.to - at) * factor);
  const pan = (share) => { const by = Math.max(-view.from, Math.min(wall - view.to, share * (view.to - view.from))); setView(view.from + by, view.to + by); };

  /** The run's parts within the view, once for each height of a row: each row then shows its spans of it. */
  function strip(height) {
    if (strips.has(height)) return strips.get(height);
    const made = el("canvas", { width: Math.round(plotWidth() * ratio), height: Math.round(height * ratio) });
    const c = made.getContext("2d");
    const scale = made.width / (view.to - view.from);
    const { start, end, part, slow } = data.segments;
    const slowPart = parts.findIndex((one) => one.name === "straggler");
    for (let place = firstAbove(end, view.from); place < start.length && start[place] < view.to; place += 1) {
      let x0 = (Math.max(start[place], view.from) - view.from) * scale;
      let x1 = (Math.min(end[place], view.to) - view.from) * scale;
      if (x1 - x0 > 3) { x0 = Math.round(x0); x1 = Math.round(x1); }
      const fill = (which, y) => {
        tiles[which].pattern ||= c.createPattern(tiles[which].canvas, "repeat");
        c.fillStyle = tiles[which].pattern;
        c.fillRect(x0, y, x1 - x0, made.height - y);
      };
      fill(part[place], 0);
      if (slow[place]) fill(slowPart, made.height * (1 - slow[place] / (end[place] - start[place])));
    }
    strips.set(height, made);
    return made;
  }

  function schedule() {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  }

  function draw() {
    const width = scroller.clientWidth;
    if (!width) return;
    const total = HEAD + offsets.at(-1) + 4;
    const height = Math.min(total, isPrinting ? 900 : 456);
    space.style.height = `${total}px`;
    scroller.style.height = `${height + 2}px`;
    strips.forEach((one) => { if (one.width !== Math.round(plotWidth() * ratio)) strips = new Map(); });
    const c = fitCanvas(canvas, width, height);
    const [text, soft, line, card, faint] = ["--text", "--soft", "--line", "--card", "--faint"].map(color);
    const left = gutter();
    hits = [];
    c.fillStyle = card;
    c.fillRect(0, 0, width, height);
    const top = scroller.scrollTop;
    let num = 0;
    for (let place = Math.max(0, firstAbove(offsets, top) - 1); place < rows.length && offsets[place] - top < height - HEAD; place += 1) {
      drawRow(c, place, HEAD + offsets[place] - top, { width, left, text, soft, faint });
      num += 1;
    }
    c.fillStyle = card;
    c.fillRect(0, 0, width, HEAD - 2);
    drawHead(c, { width, left, height, text, soft, line, card });
    if (drag && drag.isRange) {
      const [x0, x1] = [drag.x0, drag.x1].sort((a, b) => a - b);
      c.globalAlpha = 0.25;
      c.fillStyle = color("--accent");
      c.fillRect(x0, 16, x1 - x0, height);
      c.globalAlpha = 1;
    }
    canvas.dataset.rows = rows.length;
    canvas.dataset.painted = num;
    canvas.dataset.from = view.from;
    canvas.dataset.to = view.to;
    const step = (view.to - view.from) / 500;
    range.textContent = `${moment(view.from, step)} to ${moment(view.to, step)} of ${time(wall)}`;
  }

  function drawRow(c, place, y, look) {
    const { node, rank } = rows[place];
    const isNode = rank === null;
    const rowHeight = isNode ? NODE_ROW : RANK_ROW;
    const bar = isNode ? 14 : 10;
    const barY = y + (rowHeight - bar) / 2;
    if (place === cursor) { c.fillStyle = look.faint; c.fillRect(0, y, look.width, rowHeight); }
    c.fillStyle = isNode ? look.text : look.soft;
    c.fillText(shorten(c, isNode ? `${node.open ? "▾" : "▸"} ${node.name}` : `rank ${rank}`, look.left - (isNode ? 14 : 34)), isNode ? 6 : 26, y + rowHeight / 2 + 1);
    c.fillStyle = look.faint;
    c.fillRect(look.left, barY + bar / 2, plotWidth(), 1);
    const image = strip(bar);
    c.save();
    c.beginPath();
    c.rect(look.left, y, plotWidth(), rowHeight);
    c.clip();
    for (const one of node.spans) {
      if (one.end < view.from || one.start > view.to || (!isNode && !layoutRanks[one.layout].has(rank))) continue;
      const x0 = Math.max(0, Math.round((xOf(Math.max(one.start, view.from)) - look.left) * ratio));
      const x1 = Math.min(image.width, Math.max(x0 + 1, Math.round((xOf(Math.min(one.end, view.to)) - look.left) * ratio)));
      if (x1 > x0) c.drawImage(image, x0, 0, x1 - x0, image.height, look.left + x0 / ratio, barY, (x1 - x0) / ratio, bar);
    }
    if (!isNode && data.slow) {
      c.strokeStyle = look.text;
      c.lineWidth = 1.5;
      for (const one of data.slow.columns) {
        if (one.end < view.from || one.start > view.to || !one.named.includes(rank) || !isHere(node, rank, one)) continue;
        c.strokeRect(xOf(one.start), barY, Math.max(2, xOf(one.end) - xOf(one.start)), bar);
      }
    }
    for (const one of node.marks) {
      if (one.at < view.from || one.at > view.to || (!isNode && one.rank !== rank)) continue;
      drawMark(c, xOf(one.at), y + rowHeight / 2, one);
    }
    c.restore();
  }

  const isHere = (node, rank, window_) => node.spans.some((one) => one.cycle === window_.cycle && layoutRanks[one.layout].has(rank));

  function drawMark(c, x, y, one) {
    c.beginPath();
    if (one.isWarning) c.arc(x, y, 4, 0, 7);
    else { c.moveTo(x, y - 6); c.lineTo(x + 6, y); c.lineTo(x, y + 6); c.lineTo(x - 6, y); c.closePath(); }
    c.fillStyle = one.isWarning ? color("--card") : color("--mark");
    c.strokeStyle = one.isWarning ? color("--mark") : color("--mark-text");
    c.lineWidth = 1.5;
    c.fill();
    c.stroke();
    hits.push({ x0: x - 7, x1: x + 7, y0: y - 7, y1: y + 7, found: [one] });
  }

  function drawHead(c, look) {
    const plot = plotWidth();
    const [found, step] = ticks(view.from, view.to, Math.max(2, plot / (wall < 120 ? 70 : 100)));
    c.fillStyle = look.soft;
    c.strokeStyle = look.line;
    c.lineWidth = 1;
    c.fillText("time", 6, 10);
    for (const at of found) {
      const x = Math.round(xOf(at)) + 0.5;
      c.beginPath(); c.moveTo(x, 17); c.lineTo(x, look.height); c.globalAlpha = 0.45; c.stroke(); c.globalAlpha = 1;
      const label = moment(at, step);
      const size = c.measureText(label).width;
      c.fillText(label, Math.min(Math.max(look.left, x - size / 2), look.left + plot - size), 10);
    }
    c.fillStyle = look.text;
    c.fillText("run", 6, 47);
    const image = strip(18);
    c.drawImage(image, 0, 0, image.width, image.height, look.left, 38, plot, 18);
    c.fillStyle = look.soft;
    c.fillText("cycle", 6, 67);
    let free = look.left;
    for (const one of data.cycles) {
      const x = xOf(one.start);
      if (x < look.left || one.start > view.to) { if (!(one.end > view.from && one.start < view.from)) continue; }
      const from = Math.max(x, look.left);
      const until = Math.min(xOf(one.end), look.left + plot);
      c.strokeStyle = look.soft;
      c.beginPath(); c.moveTo(from, 74.5); c.lineTo(Math.max(from + 1, until - 1), 74.5); c.moveTo(from + 0.5, 70); c.lineTo(from + 0.5, 75); c.stroke();
      const label = String(one.cycle);
      if (from + 3 >= free) {
        c.fillText(label, from + 3, 66);
        free = from + 9 + c.measureText(label).width;
      }
    }
    drawPins(c, look);
  }

  function drawPins(c, look) {
    const groups = [];
    for (const one of incidents) {
      if (one.at < view.from || one.at > view.to) continue;
      const x = xOf(one.at);
      const last = groups.at(-1);
      if (last && x - last.x < 24) last.found.push(one); else groups.push({ x, found: [one] });
    }
    c.textAlign = "center";
    for (const { x, found } of groups) {
      const label = found.length === 1 ? String(found[0].number) : `${found.length}×`;
      const size = Math.max(16, c.measureText(label).width + 8);
      const isPicked = found.some((one) => one.index === picked);
      const middle = Math.min(Math.max(x, look.left + size / 2), look.left + plotWidth() - size / 2);
      c.fillStyle = isPicked ? color("--focus") : color("--mark");
      c.beginPath(); c.roundRect(middle - size / 2, 19, size, 14, 3); c.moveTo(x - 4, 33); c.lineTo(x + 4, 33); c.lineTo(x, 38); c.fill();
      c.fillStyle = color("--mark-text");
      c.fillText(label, middle, 26.5);
      hits.push({ x0: middle - size / 2, x1: middle + size / 2, y0: 18, y1: 38, found });
    }
    c.textAlign = "left";
  }

  // -- what the pointer and the keys do ------------------------------------------------------------------------

  const hitAt = (x, y) => hits.findLast((one) => x >= one.x0 && x <= one.x1 && y >= one.y0 && y <= one.y1);
  const rowAt = (y) => (y < HEAD ? -1 : Math.min(rows.length, firstAbove(offsets, y - HEAD + scroller.scrollTop) - 1));
  const place = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };

  function describe(x, y) {
    const hit = hitAt(x, y);
    if (hit) return [...hit.found.slice(0, 6).map((one) => `${one.number}  ${words(one.kind)}${whoOf(one) ? `, ${whoOf(one)}` : ""} at ${moment(one.at)}${one.isWarning ? "" : `, cost ${time(one.cost)}`}`), hit.found.length > 6 ? `and ${hit.found.length - 6} more` : "", hit.found.length === 1 ? hit.found[0].text.slice(0, 240) : "click to zoom in"];
    if (x < gutter()) { const row = rows[rowAt(y)]; return row && row.rank === null ? [row.node.name, row.node.open ? "click: hide its ranks" : "click: show its ranks"] : null; }
    const at = timeAt(x);
    if (at < 0 || at > wall) return null;
    const segment = firstAbove(data.segments.end, at);
    const lines = [`${moment(at, (view.to - view.from) / 500)}, ${date(at)}`];
    const row = rows[rowAt(y)];
    const span = row?.node.spans.find((one) => one.start <= at && at <= one.end && (row.rank === null || layoutRanks[one.layout].has(row.rank)));
    if (row) lines.push(`${row.node.name}${row.rank === null ? (span ? `, ranks ${data.nodes.layouts[span.layout].text}` : "") : `, rank ${row.rank}`}${span ? "" : ": no worker"}`);
    if (segment < data.segments.start.length && data.segments.start[segment] <= at && (!row || span)) {
      const slow = data.segments.slow[segment];
      const length = data.segments.end[segment] - data.segments.start[segment];
      lines.push(`${words(parts[data.segments.part[segment]].name)}, ${time(length)}${slow ? `, of it ${time(slow)} for slow ranks` : ""}`);
      if (data.segments.incident[segment] >= 0) lines.push(`because of incident ${data.segments.incident[segment] + 1}`);
    }
    const cycle = data.cycles[span ? span.cycle : data.cycles.findIndex((one) => one.start <= at && at <= one.end)];
    if (cycle) lines.push(`cycle ${cycle.cycle} of ${cycle.job}${cycle.to !== null ? `, iterations ${cycle.from ?? 0} to ${cycle.to}` : ""}`);
    return lines;
  }

  function open(found) {
    if (found.length === 1) { pick(found[0]); incidentTable.open(found[0].id, true); return; }
    const margin = Math.max(wall / 1000, (found.at(-1).at - found[0].at) * 0.3);
    setView(found[0].at - margin, found.at(-1).at + margin);
  }

  function pick(one) {
    picked = one.isWarning ? -1 : one.index;
    if (one.at < view.from || one.at > view.to) { const half = (view.to - view.from) / 2; setView(one.at - half, one.at + half); }
    schedule();
  }

  function toggle(row) {
    if (!row || row.rank !== null) return;
    row.node.open = !row.node.open;
    layRows();
  }

  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const [x, y] = place(event);
    drag = { x0: x, x1: x, y0: y, from: view.from, to: view.to, isPan: event.shiftKey, isRange: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (drag) {
      drag.x1 = Math.max(gutter(), Math.min(x, gutter() + plotWidth()));
      const moved = Math.abs(x - drag.x0) > 5;
      if (drag.isPan && moved) { const by = ((drag.x0 - x) / plotWidth()) * (drag.to - drag.from); setView(drag.from + by, drag.to + by); }
      else if (moved && drag.x0 >= gutter()) drag.isRange = true;
      hideTip();
      schedule();
      return;
    }
    canvas.style.cursor = hitAt(x, y) || x < gutter() ? "pointer" : "crosshair";
    const lines = describe(x, y);
    if (lines) showTip(event.clientX, event.clientY, lines); else hideTip();
  });
  canvas.addEventListener("pointerup", (event) => {
    const ended = drag;
    drag = null;
    if (!ended) return;
    const [x, y] = place(event);
    if (ended.isRange) { const [t0, t1] = [timeAt(ended.x0), timeAt(ended.x1)].sort((a, b) => a - b); setView(t0, t1); return; }
    if (Math.abs(x - ended.x0) > 5) return;
    const hit = hitAt(x, y);
    if (hit) open(hit.found);
    else if (x < gutter() && y >= HEAD) { cursor = rowAt(y); toggle(rows[cursor]); }
    schedule();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; schedule(); });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", (event) => {
    const [x, y] = place(event);
    // A page that is scrolled past the timeline must not stop there: the wheel zooms once the timeline has the focus.
    if (!(event.ctrlKey || event.metaKey || event.shiftKey || y < HEAD || document.activeElement === canvas)) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / plotWidth());
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), timeAt(Math.max(gutter(), x)));
  }, { passive: false });
  canvas.addEventListener("dblclick", (event) => { const [x] = place(event); if (x >= gutter()) zoom(0.4, timeAt(x)); });

  function step(by) {
    cursor = Math.max(0, Math.min(rows.length - 1, cursor + by));
    const [top, bottom] = [offsets[cursor], offsets[cursor + 1] + HEAD - canvas.clientHeight];
    if (scroller.scrollTop > top) scroller.scrollTop = top;
    if (scroller.scrollTop < bottom) scroller.scrollTop = bottom;
  }
  function next(by) {
    if (!incidents.length) return;
    const at = incidents.findIndex((one) => one.index === picked);
    pick(incidents[at < 0 ? (by > 0 ? 0 : incidents.length - 1) : (at + by + incidents.length) % incidents.length]);
    const one = incidents.find((each) => each.index === picked);
    const box = canvas.getBoundingClientRect();
    showTip(box.left + xOf(one.at), box.top + 30, describe(xOf(one.at), 28) || [one.text]);
  }
  const keys = {
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), ArrowUp: () => step(-1), ArrowDown: () => step(1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), _: () => zoom(1 / 0.6),
    Home: () => setView(0, view.to - view.from), End: () => setView(wall - (view.to - view.from), wall),
    PageUp: () => step(-10), PageDown: () => step(10), n: () => next(1), p: () => next(-1),
    Escape: () => { hideTip(); picked = -1; setView(0, wall); },
    Enter: () => { if (picked >= 0) incidentTable.open(`incident-${picked}`, true); else toggle(rows[cursor]); }, " ": () => toggle(rows[cursor]),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
    schedule();
  });
  canvas.addEventListener("blur", hideTip);
  scroller.addEventListener("scroll", schedule);
  redraws.push(() => { strips = new Map(); draw(); });

  const all = el("button", { type: "button", id: "all-ranks", onclick: () => showRanks(!nodes.every((node) => node.open)) }, "Show ranks");
  function showRanks(isOpen) {
    nodes.forEach((node) => { node.open = isOpen; });
    all.textContent = isOpen ? "Hide ranks" : "Show ranks";
    layRows();
  }

  return {
    build() {
      const used = parts.map((one, at) => [one, at]).filter(([one]) => one.seconds > 0);
      const made = section("timeline", "Timeline", "Timeline",
        el("div", { class: "row" },
          el("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.6) }, "+"),
          el("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(1 / 0.6) }, "−"),
          el("button", { type: "button", id: "reset-view", onclick: () => setView(0, wall) }, "Whole run"),
          nodes.length ? all : null, range),
        scroller,
        el("div", { class: "legend" }, used.map(([one, at]) => el("span", {}, swatch(at, { class: "swatch" }), words(one.name))), el("span", {}, "◆ incident"), data.warned.length ? el("span", {}, "○ warning") : null, data.slow?.named.length ? el("span", {}, "▭ named as slow") : null),
        el("p", { class: "soft small hint", id: "timeline-hint" }, "Drag to zoom into a stretch, Shift and drag to move; the wheel zooms over the times, or after a click. Click a node to see its ranks, a number to open the incident. A row is empty where the node had no worker."));
      if (nodes.length <= 2) showRanks(true);
      layRows();
      return made;
    },
    resize: () => { strips = new Map(); schedule(); },
    show: pick,
  };
})();
