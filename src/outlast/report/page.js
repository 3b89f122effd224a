// -- incidents -----------------------------------------------------------------------------------------------------

function facts(value) {
  if (Array.isArray(value)) {
    if (value.every((one) => one === null || typeof one !== "object")) return value.join(", ");
    return el("dl", {}, value.flatMap((one, place) => [el("dt", {}, `${place + 1}`), el("dd", {}, facts(one))]));
  }
  if (value !== null && typeof value === "object") return el("dl", {}, Object.entries(value).flatMap(([name, one]) => [el("dt", {}, words(name)), el("dd", {}, facts(one))]));
  return typeof value === "number" && !Number.isInteger(value) ? digits(value, 6) : String(value);
}

function list(pairs) {
  return el("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function describeTiers(load) {
  return Object.entries(load.tiers).map(([tier, num]) => `${tier}: ${count(num, "rank")}${load.bytes_read[tier] ? `, ${bytes(load.bytes_read[tier])}` : ""}`).join("; ");
}

function detailOf(one) {
  const box = el("div", { class: "detail-grid" });
  box.append(el("p", { class: "all" }, one.text));
  const times = list([
    ["noticed", `${moment(one.at)}, ${date(one.at)}`],
    ["happened", one.since !== null && one.since !== undefined ? `${time(Math.max(0, one.at - one.since))} before` : null],
    ["trains again", one.isWarning ? null : one.recovered !== null ? `${time(Math.max(0, one.recovered - one.at))} after` : "not yet, as far as the journal goes"],
    ["where", [whoOf(one), one.section ? `section ${one.section}` : "", one.pid ? `pid ${one.pid}` : ""].filter(Boolean).join(", ")],
    ["job, cycle", one.cycle === null ? one.job : `${one.job}, cycle ${one.cycle}`],
    ["iteration", one.iteration],
    ["resumed from", one.isWarning || one.resumed === null ? null : `iteration ${one.resumed}${one.lost ? `, ${count(one.lost, "iteration")} redone` : ", nothing redone"}`],
    ["reported by", one.isWarning && one.num_reports > 1 ? count(one.num_reports, "rank") : null],
    ["injected fault", one.simulated],
  ]);
  box.append(el("div", {}, el("h3", {}, "What happened"), times));
  if (!one.isWarning) {
    const ended = one.exited ? [`exit code ${one.exited.exit_code ?? "not known"}`, one.exited.killed_by_us ? "ended by outlast" : ""].filter(Boolean).join(", ") : null;
    const cost = Object.entries(one.parts).filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
    const right = el("div", {}, el("h3", {}, "What was decided, and why"), list([
      ["remedy", one.recovery_level ? DONE[one.recovery_level] || words(one.recovery_level) : "nothing was decided"], ["why", one.reason],
      ["quarantined", one.quarantine.join(", ")], ["held back", one.hold_back.join(", ")], ["its process", ended],
      ["state came from", one.load ? `iteration ${one.load.iteration}, ${describeTiers(one.load)}, in ${time(one.load.load_s)}` : null],
    ]));
    if (cost.length) {
      right.append(el("h3", {}, `Cost: ${time(one.cost)}, ${percent(one.cost / wall)} of the run`));
      right.append(el("div", { class: "stack", "aria-hidden": "true" }, cost.map(([name, seconds]) => swatch(parts.findIndex((part) => part.name === name), { style: { width: `${(100 * seconds) / one.cost}%` } }))));
      right.append(el("div", { class: "legend" }, cost.map(([name, seconds]) => el("span", {}, swatch(parts.findIndex((part) => part.name === name), { class: "swatch" }), `${words(name)} ${time(seconds)}`))));
    }
    box.append(right);
    if (one.load?.rejected.length) box.append(el("div", { class: "all" }, el("h3", {}, "Rejected copies"), el("pre", {}, one.load.rejected.join("\n"))));
  }
  const evidence = Object.entries(one.evidence || {});
  if (evidence.length) box.append(el("div", { class: "all" }, el("h3", {}, "Evidence"), facts(one.evidence)));
  const files = one.files || [];
  files.forEach((file, place) => {
    const head = `${file.title} (${file.path})`;
    const isShown = place === 0 && file.text;
    box.append(file.text ? el("details", { class: "all", open: isShown ? "" : null }, el("summary", {}, head), el("pre", { class: "file" }, file.text)) : el("p", { class: "all soft small" }, `${head}: ${file.why_not}`));
  });
  if (one.output?.length && !files.some((file) => file.title.startsWith("Traceback"))) box.append(el("div", { class: "all" }, el("h3", {}, "Last output"), el("pre", { class: "file" }, one.output.join("\n"))));
  if (data.kinds[one.kind]) box.append(el("p", { class: "all soft small" }, `${words(one.kind)}: ${data.kinds[one.kind]}`));
  box.append(el("p", { class: "all row" }, el("button", { type: "button", onclick: () => { timeline.show(one); byId("timeline").scrollIntoView(); byId("timeline-canvas").focus({ preventScroll: true }); } }, "Show on the timeline")));
  return box;
}

const PAGE = 200;
function entryTable(all, columns, sortedBy, isDown) {
  let shown = PAGE;
  let order = { column: sortedBy, isDown };
  const opened = new Set();
  const details = new Map();
  const heads = columns.map((column, place) => el("th", { class: `${column.cls || ""} ${column.num ? "num" : ""}`.trim(), scope: "col" },
    el("button", { type: "button", onclick: () => { order = { column: place, isDown: order.column === place ? !order.isDown : Boolean(column.num) }; fill(); } }, column.head)));
  const body = el("tbody", {});
  const more = el("button", { type: "button", onclick: () => { shown = Infinity; fill(); } });
  const costliest = all.reduce((best, one) => ((one.cost || 0) > (best?.cost || 0) ? one : best), null);
  const table = el("table", {}, el("thead", {}, el("tr", {}, heads)), body);

  function sorted() {
    const { of } = columns[order.column];
    return [...all].sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      const less = x === y ? 0 : x === null || x === undefined ? -1 : y === null || y === undefined ? 1 : x < y ? -1 : 1;
      return order.isDown ? -less : less;
    });
  }

  function toggle(one, row, button) {
    const isOpen = !opened.has(one.id);
    if (isOpen) opened.add(one.id); else opened.delete(one.id);
    button.setAttribute("aria-expanded", String(isOpen));
    button.firstChild.textContent = isOpen ? "▾ " : "▸ ";
    if (isOpen) row.after(detail(one)); else details.get(one.id)?.remove();
  }

  function detail(one) {
    if (!details.has(one.id)) details.set(one.id, el("tr", { class: "detail", id: `${one.id}-detail` }, el("td", { colspan: columns.length }, detailOf(one))));
    const made = details.get(one.id);
    paintSwatches(made);
    return made;
  }

  function rowOf(one) {
    const button = el("button", { type: "button", "aria-expanded": String(opened.has(one.id)), "aria-controls": `${one.id}-detail`, "aria-label": `${one.number}: ${words(one.kind)}, ${whoOf(one)}; details` }, el("span", { "aria-hidden": "true" }, opened.has(one.id) ? "▾ " : "▸ "), one.number);
    const row = el("tr", { class: "entry", id: one.id });
    row.append(...columns.map((column, place) => el("td", { class: `${column.cls || ""} ${column.num ? "num" : ""}`.trim() }, place === 0 ? button : column.show(one, one === costliest && one.cost > 0))));
    row.addEventListener("click", (event) => {
      if (window.getSelection()?.toString() && !button.contains(event.target)) return;
      toggle(one, row, button);
    });
    return row;
  }

  function fill() {
    heads.forEach((head, place) => head.setAttribute("aria-sort", place === order.column ? (order.isDown ? "descending" : "ascending") : "none"));
    heads.forEach((head, place) => { head.firstChild.textContent = columns[place].head + (place === order.column ? (order.isDown ? " ▼" : " ▲") : ""); });
    body.replaceChildren(...sorted().slice(0, shown).flatMap((one) => (opened.has(one.id) ? [rowOf(one), detail(one)] : [rowOf(one)])));
    more.hidden = all.length <= shown;
    more.textContent = `Show all ${all.length}`;
  }
  fill();
  return {
    element: el("div", {}, el("div", { class: "wide" }, table), more),
    open(id, isFocused) {
      const one = all.find((each) => each.id === id);
      if (!one) return false;
      if (!byId(id)) { shown = Infinity; fill(); }
      const row = byId(id);
      const button = row.querySelector("button");
      if (!opened.has(id)) toggle(one, row, button);
      row.scrollIntoView({ block: "start" });
      if (isFocused) button.focus({ preventScroll: true });
      return true;
    },
  };
}

const COLUMNS = [
  { head: "#", of: (one) => one.at },
  { head: "When", of: (one) => one.at, show: (one) => moment(one.at), cls: "when" },
  { head: "What", of: (one) => one.kind, show: (one, isCostliest) => el("div", { class: "what" }, el("strong", {}, words(one.kind)), isCostliest ? el("span", { class: "costliest" }, "costliest") : null, el("span", { class: "line" }, one.text)) },
  { head: "Where", of: whoOf, show: whoOf, cls: "few" },
  { head: "What was done", of: (one) => one.recovery_level, show: (one) => DONE[one.recovery_level] || words(one.recovery_level) || "-", cls: "few" },
  { head: "Noticed after", num: true, of: (one) => (one.since === null ? null : one.at - one.since), show: (one) => (one.since === null ? "-" : time(Math.max(0, one.at - one.since))), cls: "few mid" },
  { head: "Recovered after", num: true, of: (one) => (one.recovered === null ? null : one.recovered - one.at), show: (one) => (one.recovered === null ? "-" : time(Math.max(0, one.recovered - one.at))), cls: "few mid" },
  { head: "Redone", num: true, of: (one) => one.lost, show: (one) => one.lost === null ? "-" : one.lost },
  { head: "Cost", num: true, of: (one) => one.cost, show: (one) => time(one.cost) },
];
const WARNING_COLUMNS = [...COLUMNS.slice(0, 4), { head: "Iteration", num: true, of: (one) => one.iteration, show: (one) => one.iteration ?? "-" }];

const incidentTable = (() => {
  const tables = [];
  return {
    build() {
      const made = [];
      if (incidents.length) {
        tables.push(entryTable(incidents, COLUMNS, 8, true));
        made.push(section("incidents", `Incidents (${incidents.length})`, "Incidents", el("p", { class: "soft small" }, "Each opens what is known about it: stack, last output, what was decided and why, what it cost."), tables.at(-1).element));
      }
      const warned = entries.filter((one) => one.isWarning);
      if (warned.length) {
        tables.push(entryTable(warned, WARNING_COLUMNS, 0, false));
        made.push(section("warnings", `Warnings (${warned.length})`, "Warnings", el("p", { class: "soft small" }, "Seen, and it ended nothing: slow ranks, rejected copies, failed saves, results that were judged."), tables.at(-1).element));
      }
      made.forEach((one) => one.classList.add("long"));
      return made;
    },
    open: (id, isFocused) => tables.some((table) => table.open(id, isFocused)),
  };
})();

// -- figures -------------------------------------------------------------------------------------------------------

function buildTop() {
  const mtbf = data.statistics.mtbf_s.all;
  const mttr = data.statistics.mttr_s.all;
  const leaving = data.statistics.num_incidents.preempted || 0;
  const tile = (value, label, more) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, label), more ? el("span", {}, more) : null);
  return el("div", { id: "top" }, el("h1", { class: "headline" }, run.headline),
    el("p", { class: "soft" }, [run.id ? `Run ${run.id}` : "A run", `began ${date(0)}`, run.state, count(data.jobs.length, "job"), count(data.cycles.length, "cycle"), run.num_iterations === null ? "" : `iteration ${run.num_iterations.toLocaleString("en")}`].filter(Boolean).join(" · ")),
    el("div", { class: "tiles" },
      tile(run.ettr === null ? "not known" : percent(run.ettr), "goodput", run.ettr === null ? "no rank reported a step" : "productive share of the wall time"),
      tile(time(run.wall_s), "wall time"), tile(run.num_incidents.toLocaleString("en"), "incidents", [leaving ? `${leaving} requested shutdown${leaving === 1 ? "" : "s"}` : "", run.num_in_process ? `${run.num_in_process} restarted in process` : "", run.num_spared ? `${count(run.num_spared, "rank")} spared` : "", data.warned.length ? count(data.warned.length, "warning") : ""].filter(Boolean).join(", ")),
      tile(run.lost_iterations === null ? "not known" : `${run.lost_is_minimum ? "at least " : ""}${run.lost_iterations.toLocaleString("en")}`, "iterations redone", run.lost_iterations === null ? "the script has no session" : ""), tile(time(mtbf), "between failures (MTBF)"), tile(time(mttr), "mean recovery (MTTR)", data.statistics.mttd_s.all !== undefined ? `noticed after ${time(data.statistics.mttd_s.all)}` : "")));
}

function buildGoodput() {
  const bars = el("div", { class: "bars" });
  const largest = Math.max(...parts.map((one) => one.seconds), 1e-9);
  parts.forEach((one, place) => {
    const cls = one.seconds > 0 ? "" : "nil";
    bars.append(el("span", { class: cls }, swatch(place, { class: "swatch" }), words(one.name)),
      el("span", { class: "track", "aria-hidden": "true" }, one.seconds > 0 ? swatch(place, { style: { width: `${(100 * one.seconds) / largest}%` } }) : null),
      el("span", { class: `num ${cls}` }, time(one.seconds)), el("span", { class: `num ${cls}` }, percent(one.seconds / wall)),
      el("span", { class: "soft small meaning" }, one.meaning));
  });
  const { mtbf_s: mtbf, mttd_s: mttd, mttr_s: mttr, num_incidents: num } = data.statistics;
  const kinds = Object.keys(num).filter((one) => one !== "all");
  const means = kinds.length ? el("div", { class: "plots" },
    el("div", { class: "wide" }, el("h3", {}, "By kind"), el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Kind"), ["Number", "Between two", "Noticed after"].map((one) => el("th", { class: "num", scope: "col" }, one)))),
      el("tbody", {}, [...kinds, "all"].map((one) => el("tr", {}, el("td", {}, one === "all" ? "all failures" : words(one)), el("td", { class: "num" }, num[one] ?? 0), el("td", { class: "num" }, time(mtbf[one])), el("td", { class: "num" }, time(mttd[one]))))))),
    el("div", { class: "wide" }, el("h3", {}, "By remedy"), el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Remedy"), el("th", { class: "num", scope: "col" }, "Mean recovery"))),
      el("tbody", {}, Object.entries(mttr).map(([one, seconds]) => el("tr", {}, el("td", {}, one === "all" ? "all failures" : DONE[one] || words(one)), el("td", { class: "num" }, time(seconds)))))))) : null;
  return section("goodput", "Where the time went", "Goodput", el("p", { class: "soft small" }, `The parts add up to the wall time, ${time(run.wall_s)}.`), bars, means);
}

/** A curve, or dots, of [seconds, value, iteration]; a new curve starts where iterations go back. */
function plot({ title, points, x, isTime, show, isDots }) {
  const figure = el("figure", {});
  const readout = el("span", { class: "num" });
  const holder = el("div", {});
  figure.append(el("figcaption", {}, title, " ", readout), holder);
  function draw() {
    const width = Math.max(240, holder.clientWidth || 480);
    const height = 180;
    const [left, right, top, bottom] = [64, 10, 8, 24];
    const xs = points.map(x);
    const [x0, x1] = isTime ? [0, wall] : [Math.min(...xs), Math.max(...xs)];
    const values = points.map((one) => one[1]);
    let [low, high] = [isDots ? 0 : Math.min(...values), Math.max(...values)];
    if (high <= low) { high = low + (Math.abs(low) || 1) * 0.5; low -= isDots ? 0 : (Math.abs(low) || 1) * 0.5; }
    const px = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - right);
    const py = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
    const root = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}: from ${show(Math.min(...values))} to ${show(Math.max(...values))}, ${points.length} points` });
    for (const value of ticks(low, high, 4, false)[0]) {
      root.append(svg("path", { class: "axis", d: `M${left} ${py(value)}H${width - right}` }), svg("text", { x: left - 6, y: py(value) + 4, "text-anchor": "end" }, show(value)));
    }
    const [marks, between] = ticks(x0, x1, width / 100, isTime);
    for (const at of marks) if (isTime || Number.isInteger(at)) root.append(svg("text", { x: Math.min(width - right - 14, Math.max(left + 6, px(at))), y: height - 6, "text-anchor": "middle" }, isTime ? moment(at, between) : at.toLocaleString("en")));
    if (isTime && incidents.length <= 30) for (const one of incidents) root.append(svg("path", { class: "event", d: `M${px(one.at).toFixed(1)} ${top}V${height - bottom}` }));
    if (!isDots) {
      let path = "";
      points.forEach((one, place) => { path += `${place && xs[place] >= xs[place - 1] ? "L" : "M"}${px(xs[place]).toFixed(1)} ${py(one[1]).toFixed(1)}`; });
      root.append(svg("path", { class: "curve", d: path }));
    }
    if (isDots || points.length <= 60) points.forEach((one, place) => root.append(svg("circle", { class: "dot", r: 2.4, cx: px(xs[place]).toFixed(1), cy: py(one[1]).toFixed(1) })));
    const now = svg("circle", { class: "now", r: 5, cx: -20, cy: -20 });
    root.append(now);
    root.addEventListener("pointermove", (event) => {
      const at = ((event.clientX - root.getBoundingClientRect().left) / root.clientWidth) * width;
      let best = 0;
      xs.forEach((value, place) => { if (Math.abs(px(value) - at) < Math.abs(px(xs[best]) - at)) best = place; });
      now.setAttribute("cx", px(xs[best]));
      now.setAttribute("cy", py(points[best][1]));
      showTip(event.clientX, event.clientY, [show(points[best][1]), `iteration ${points[best][2]}, ${moment(points[best][0])}`]);
    });
    root.addEventListener("pointerleave", () => { now.setAttribute("cx", -20); hideTip(); });
    holder.replaceChildren(root);
  }
  redraws.push(draw);
  return figure;
}

function buildSlow() {
  const { slow } = data;
  if (!slow || !slow.columns.some((one) => /[^-]/.test(one.scores))) return null;
  const LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const level = Object.fromEntries([...LEVELS].map((char, place) => [char, place / 63]));
  const num = slow.columns[0].scores.length;
  const canvas = el("canvas", { class: "heat", role: "img", "aria-label": "Scores of the ranks over the windows; the list below names the slow ones", id: "heat" });
  const height = Math.max(80, Math.min(480, num * 14));
  const left = 56;
  let shape = null;
  function draw() {
    const width = canvas.clientWidth || 600;
    const c = fitCanvas(canvas, width, height);
    const mix = [color("--heat-low"), color("--heat-mid"), color("--heat-high")].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    const paint = (score) => {
      const [from, to, share] = score < 0.5 ? [mix[0], mix[1], score * 2] : [mix[1], mix[2], score * 2 - 1];
      return `rgb(${from.map((one, place) => Math.round(one + (to[place] - one) * share)).join()})`;
    };
    const numRows = Math.min(num, height - 20);
    const each = Math.ceil(num / numRows);
    const cellHeight = (height - 20) / Math.ceil(num / each);
    const cellWidth = (width - left) / slow.columns.length;
    c.fillStyle = color("--card");
    c.fillRect(0, 0, width, height);
    slow.columns.forEach((column, at) => {
      for (let row = 0; row * each < num; row += 1) {
        let lowest = null;
        for (let rank = row * each; rank < Math.min(num, (row + 1) * each); rank += 1) {
          const score = level[column.scores[rank]];
          if (score !== undefined && (lowest === null || score < lowest)) lowest = score;
        }
        if (lowest === null) continue;
        c.fillStyle = paint(lowest);
        c.fillRect(left + at * cellWidth, row * cellHeight, Math.max(1, cellWidth + 0.3), Math.max(1, cellHeight + 0.3));
      }
    });
    c.lineWidth = 2;
    c.strokeStyle = color("--text");
    slow.columns.forEach((column, at) => column.named.forEach((rank) => {
      const row = Math.floor(rank / slow.ranks_each / each);
      c.strokeRect(left + at * cellWidth + 1, row * cellHeight + 1, Math.max(3, cellWidth - 2), Math.max(3, cellHeight - 2));
    }));
    c.fillStyle = color("--soft");
    const between = num * 13 <= height ? 1 : Math.max(1, ticks(0, num, height / 32, false)[1]);
    for (let rank = 0; rank < num; rank += between) c.fillText(`rank ${rank * slow.ranks_each}`, 2, (rank / each) * cellHeight + Math.max(7, cellHeight / 2), left - 6);
    c.textAlign = "center";
    const some = Math.max(1, Math.ceil(slow.columns.length / ((width - left) / 130)));
    for (let at = 0; at < slow.columns.length; at += some) c.fillText(`iteration ${slow.columns[at].iteration}`, Math.min(width - 40, Math.max(left + 38, left + (at + 0.5) * cellWidth)), height - 8);
    c.textAlign = "left";
    shape = { cellWidth, cellHeight, each };
  }
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = slow.columns[Math.floor((event.clientX - box.left - left) / shape.cellWidth)];
    const row = Math.floor((event.clientY - box.top) / shape.cellHeight) * shape.each;
    if (!column || row < 0 || row >= num) { hideTip(); return; }
    const found = [...column.scores.slice(row, row + shape.each)].map((char) => level[char]).filter((one) => one !== undefined);
    const first = row * slow.ranks_each;
    const last = Math.min(slow.num_ranks, (row + shape.each) * slow.ranks_each) - 1;
    showTip(event.clientX, event.clientY, [`${first === last ? `rank ${first}` : `ranks ${first} to ${last}, the lowest`}: ${found.length ? `score ${Math.min(...found).toFixed(2)}` : "no score"}`, `iteration ${column.iteration}, ${moment(column.start)} to ${moment(column.end)}`, column.named.length ? `named: ${column.named.join(", ")}` : column.why_nobody, column.excess ? `steps took ${percent(column.excess)} of their time for slow ranks` : ""]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  redraws.push(draw);
  const named = slow.named.length ? el("ul", { class: "small columns" }, slow.named.slice(0, 20).map((one) => el("li", {}, `rank ${one.rank}: named in ${count(one.num, "window")}, lowest score ${one.lowest.toFixed(2)}, from ${moment(one.first)} to ${moment(one.last)}`))) : el("p", { class: "soft small" }, "No rank was named.");
  return section("slow", "Slow ranks", "Slow ranks", el("p", { class: "soft small" }, "Relative score of each rank: 1 is as fast as the others, 0.5 takes twice as long. Ranks that were named have a frame. ", el("span", {}, "0", el("span", { class: "ramp" }), "1"), slow.windows_each > 1 ? ` A column shows the lowest of ${slow.windows_each} windows.` : ""), canvas, named);
}

function buildCheckpoints() {
  const { saves, loads } = data;
  if (!saves.num && !loads.length) return null;
  const tiers = Object.entries(saves.tiers);
  const children = [];
  if (tiers.length) children.push(el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Tier"), ["Generations", "Newest", "Bytes of one"].map((one) => el("th", { class: "num", scope: "col" }, one)))),
    el("tbody", {}, tiers.map(([tier, one]) => el("tr", {}, el("td", {}, tier === "none" ? "not committed, as far as is known" : tier), el("td", { class: "num" }, one.num), el("td", { class: "num" }, `${one.newest}, at ${moment(one.at)}`), el("td", { class: "num" }, one.num_bytes ? bytes(one.num_bytes / one.num) : "-")))))));
  const plots = el("div", { class: "plots" });
  const stalled = saves.stall.some((one) => one[1] > 0);
  if (saves.stall.length && stalled) plots.append(plot({ title: "How long training waited for a save", points: saves.stall, x: (one) => one[0], isTime: true, show: time, isDots: true }));
  if (saves.duration.length) plots.append(plot({ title: "How long until it was durable", points: saves.duration, x: (one) => one[0], isTime: true, show: time, isDots: true }));
  children.push(plots);
  if (loads.length) {
    const rows = el("tbody", {});
    const more = el("button", { type: "button", onclick: () => fill(loads.length) }, `Show all ${loads.length}`);
    const fill = (num) => {
      more.hidden = num >= loads.length;
      rows.replaceChildren(...loads.slice(-num).map((one) => el("tr", {}, el("td", { class: "when" }, moment(one.at)), el("td", { class: "num" }, one.iteration), el("td", { class: "num" }, time(one.load_s)), el("td", {}, describeTiers(one)), el("td", {}, one.rejected.length ? el("details", {}, el("summary", {}, one.rejected.length), el("pre", {}, one.rejected.join("\n"))) : "none"))));
    };
    fill(20);
    children.push(el("h3", {}, `Loads (${loads.length})`), el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "When"), el("th", { class: "num", scope: "col" }, "Iteration"), el("th", { class: "num", scope: "col" }, "Took"), el("th", { scope: "col" }, "From"), el("th", { scope: "col" }, "Rejected"))), rows)), more);
  }
  const made = section("checkpoints", "Checkpoints", "Checkpoints", ...children);
  made.classList.add("long");
  return made;
}

function buildTraining() {
  const { step_s: steps, loss } = data.steps;
  if (steps.length < 2 && loss.length < 2) return null;
  return section("training", "Training", "Training", el("div", { class: "plots" },
    loss.length > 1 ? plot({ title: "Loss by iteration", points: loss, x: (one) => one[2], show: (value) => digits(value, 4) }) : null,
    steps.length > 1 ? plot({ title: "Time of a step by iteration", points: steps, x: (one) => one[2], show: time }) : null));
}

function buildNotes() {
  const jobs = el("div", { class: "wide" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Job"), el("th", { scope: "col" }, "From, to"), el("th", { scope: "col" }, "How it ended"), el("th", { scope: "col", class: "few" }, "Command"))),
    el("tbody", {}, data.jobs.map((one) => el("tr", {}, el("td", {}, one.job), el("td", {}, `${moment(one.start_s)} to ${moment(one.end_s)}`), el("td", {}, one.exit_code === undefined || one.exit_code === null ? "it goes on, or its end is not in the journal" : `exit code ${one.exit_code}${one.reason ? `: ${one.reason}` : ""}`), el("td", { class: "few" }, el("div", { class: "what small" }, one.command)))))));
  const adrift = data.clocks.filter((one) => Math.abs(one.offset_s || 0) >= 0.001);
  const children = [jobs];
  if (data.notes.length) children.push(el("h3", {}, "Notes"), el("ul", {}, data.notes.map((one) => el("li", {}, one))));
  children.push(el("h3", {}, "Clocks"), adrift.length ? el("ul", {}, adrift.map((one) => el("li", {}, `${one.node}: ${time(Math.abs(one.offset_s))} ${one.offset_s > 0 ? "ahead" : "behind"}, taken off (aligned by ${count(one.num_anchors || 0, "event")})`))) : el("p", {}, "No node's clock was corrected."));
  const made = section("notes", "Jobs, notes and clocks", "Notes", ...children);
  made.classList.add("long");
  return made;
}

function buildKeys() {
  const rows = [["?", "show or close these keys"], ["Tab, Shift Tab", "go through buttons, timeline, incidents"], ["Enter, Space", "open or close an incident; on the timeline: a node"], ["← →", "timeline: earlier, later"], ["+ −", "timeline: zoom in, out"], ["↑ ↓ Page Up Page Down", "timeline: choose a row"], ["Home, End", "timeline: begin, end of the run"], ["n p, then Enter", "timeline: next, previous incident; open it"], ["Esc", "timeline: the whole run again; close what is open"]];
  const dialog = byId("keys");
  dialog.append(el("h2", { id: "keys-title" }, "Keys"), el("table", {}, el("tbody", {}, rows.map(([key, what]) => el("tr", {}, el("td", {}, el("kbd", {}, key)), el("td", {}, what))))), el("p", { class: "row" }, el("button", { type: "button", onclick: () => dialog.close() }, "Close")));
  const toggle = () => (dialog.open ? dialog.close() : dialog.showModal());
  byId("keys-button").addEventListener("click", toggle);
  document.addEventListener("keydown", (event) => { if (event.key === "?" && !event.ctrlKey && !event.altKey && !event.metaKey) { event.preventDefault(); toggle(); } });
}

// -- the page ------------------------------------------------------------------------------------------------------

document.title = `${run.id || "run"}: outlast report`;
tiles = parts.map(drawTile);
byId("main").replaceChildren(...[buildTop(), timeline.build(), ...incidentTable.build(), buildGoodput(), buildSlow(), buildCheckpoints(), buildTraining(), buildNotes(), el("footer", {}, `Made ${run.made} by outlast ${run.version}. This file holds everything that it shows; it loads nothing.`)].filter(Boolean));
byId("contents").append(...sections.map(([id, label]) => el("a", { href: `#${id}` }, label)));
buildKeys();
applyTheme();
let width = innerWidth;
window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; timeline.resize(); redraws.forEach((redraw) => redraw()); } });
if (location.hash.startsWith("#incident-") || location.hash.startsWith("#warning-")) incidentTable.open(location.hash.slice(1), false);
document.documentElement.dataset.ready = "yes";
