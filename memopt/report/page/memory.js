// The memory of a program over time, with what is alive at the cursor; and what was decided for each tensor.
const SHOWN = 12;

function timelineChart(program, budget) {
  const [before, after] = program.lines;
  const steps = Math.max(before.length, after.length, 1);
  const top = Math.max(...before, ...after, budget || 0, 1) * 1.08;
  const label = `memory of ${program.name} over its operations`;
  const area = frame(320, 74, 34, label, { tabindex: 0, role: "slider", class: "chart", "aria-valuemin": 0 });
  const x = (step) => area.left + step / steps * (area.right - area.left);
  const y = (size) => area.bottom - size / top * (area.bottom - area.top);
  area.svg.append(...byteAxis(area, top, y));
  const stairs = (values) => values.map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)} ${x(at + 1).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  if (after.length) {
    area.svg.append(make("polygon", { class: "area", points: `${x(0)},${y(0)} ${stairs(after)} ${x(after.length)},${y(0)}` }),
      make("polyline", { class: "after", points: stairs(after) }));
  }
  if (before.length) area.svg.append(make("polyline", { class: "before", points: stairs(before) }));
  if (budget !== null) area.svg.append(make("line", { class: "budget", x1: area.left, x2: area.right, y1: y(budget), y2: y(budget) }));
  if (program.forward > 0 && program.forward < after.length) {
    const at = x(program.forward);
    area.svg.append(make("line", { class: "boundary", x1: at, x2: at, y1: area.top, y2: area.bottom }),
      make("text", { class: "tick end", x: at - 6, y: area.top + 10 }, "forward"), make("text", { class: "tick", x: at + 6, y: area.top + 10 }, "backward"));
  }
  area.svg.append(make("text", { class: "tick end", x: area.right, y: area.bottom + 22 }, `${count(steps, "operation")}, in order`));
  const cursor = make("line", { class: "cursor", y1: area.top, y2: area.bottom });
  area.svg.append(cursor);

  const panel = make("div", { class: "alive", "aria-live": "off" });
  let side = after.length ? 1 : 0;
  let place = 0;
  const values = () => program.lines[side];
  const peak = () => values().indexOf(Math.max(...values()));
  function show(at) {
    place = Math.min(at, Math.max(0, values().length - 1));
    cursor.setAttribute("x1", x(place + 0.5));
    cursor.setAttribute("x2", x(place + 0.5));
    const graph = graphAt(program.graphs[side]);
    const step = graph && graph.steps[place];
    const words = `operation ${place} of ${values().length}${step ? `, ${step.name}` : ""}: ${bytes(values()[place] || 0)}`;
    area.svg.setAttribute("aria-valuemax", Math.max(0, values().length - 1));
    area.svg.setAttribute("aria-valuenow", place);
    area.svg.setAttribute("aria-valuetext", words);
    panel.replaceChildren(...alive(graph, step, place, values()[place] || 0, program.arena && side === 1).filter(Boolean));
  }
  area.svg.addEventListener("keydown", (event) => {
    const to = sliderKey(event, place, values().length - 1, { p: peak(), P: peak() });
    if (to !== null) show(to);
  });
  area.svg.addEventListener("pointermove", (event) => {
    if (event.buttons || !timelineChart.pinned.has(area.svg)) show(stepAt(event));
  });
  area.svg.addEventListener("click", (event) => {
    show(stepAt(event));
    if (!timelineChart.pinned.delete(area.svg)) timelineChart.pinned.add(area.svg);
  });
  function stepAt(event) {
    const share = (pointerX(area.svg, event) - area.left) / (area.right - area.left);
    return Math.max(0, Math.min(steps - 1, Math.floor(share * steps)));
  }
  const sides = before.length && after.length
    ? choice(program.sides, side, (to) => { side = to; show(peak()); }) : null;
  const buttons = make("p", { class: "controls" }, sides,
    make("button", { type: "button", onclick: () => { show(peak()); area.svg.focus(); } }, "go to the peak"),
    make("span", { class: "soft" }, "Move over the chart, click to hold, or use the arrow keys; p is the peak."));
  show(peak());
  return [timelineLegend(program.sides, before.length > 0, budget), area.svg, buttons, panel];
}
timelineChart.pinned = new Set();

function timelineLegend(sides, before, budget) {
  return make("p", { class: "legend" }, make("span", {}, make("span", { class: "swatch line after" }), sides[1]),
    before ? make("span", {}, make("span", { class: "swatch line before" }), sides[0]) : null,
    budget === null ? null : make("span", {}, make("span", { class: "swatch line budget" }), `budget ${bytes(budget)}`));
}

function alive(graph, step, place, total, planned) {
  const title = make("h3", {}, `Operation ${place}: ${bytes(total)}`);
  if (!graph) return [title, make("p", { class: "soft" }, "This graph was not recorded.")];
  const there = graph.storages.filter((storage) => storage.start <= place && place < storage.end).sort((a, b) => b.size - a.size);
  const sum = there.reduce((whole, storage) => whole + storage.size, 0);
  const rows = there.slice(0, SHOWN).map((storage) => {
    const node = graph.byId.get(storage.id);
    return [nodeButton(node), bytes(storage.size), `${storage.start}–${storage.end - 1}`, node.module, source(node.source)];
  });
  const rest = there.slice(SHOWN).reduce((whole, storage) => whole + storage.size, 0);
  const more = there.length > SHOWN ? make("p", { class: "soft" }, `and ${count(there.length - SHOWN, "smaller one")}, ${bytes(rest)}`) : null;
  return [title,
    step ? make("p", {}, "runs ", code(`${step.name} = ${nodeLine(step).call}`), step.source ? make("span", { class: "soft" }, " ", source(step.source)) : null) : null,
    make("p", { class: "soft" }, `${count(there.length, "tensor")} alive, ${bytes(sum)}; ${planned ? "resident, and the arena around them" : "resident and workspace"} ${bytes(Math.max(0, total - sum))}`),
    rows.length ? table(["made by", "size", "alive in operations", "module", "source"], rows, [1, 2]) : null, more];
}

function nodeButton(node) {
  return make("button", { type: "button", class: "node", title: `search the passes for ${node.name}`, onclick: () => searchFor(node.name) }, node.name);
}

// -- decisions --------------------------------------------------------------------------------------------------------------

function decisionTable(rows) {
  const heads = ["decision", "tensor", "size", "price: to recompute", "source"];
  const keys = [(row) => row[0], (row) => row[1], (row) => -row[2], (row) => -(row[3] || 0), (row) => row[4]];
  let order = 2;
  let all = false;
  let wanted = "";
  const body = make("tbody");
  const more = make("button", { type: "button", onclick: () => { all = true; draw(); } });
  const headers = heads.map((head, at) => make("th", { scope: "col", class: at === 2 || at === 3 ? "number" : null },
    make("button", { type: "button", class: "sort", onclick: () => { order = at; draw(); } }, head)));
  function draw() {
    const found = rows.filter((row) => !wanted || `${row[0]} ${row[1]} ${row[4]}`.toLowerCase().includes(wanted));
    found.sort((a, b) => (keys[order](a) < keys[order](b) ? -1 : keys[order](a) > keys[order](b) ? 1 : 0));
    headers.forEach((head, at) => head.setAttribute("aria-sort", at === order ? (at === 2 || at === 3 ? "descending" : "ascending") : "none"));
    const shown = all ? found : found.slice(0, SHOWN);
    body.replaceChildren(...shown.map(([what, name, size, time, where]) => make("tr", {},
      make("td", {}, make("span", { class: `tag ${what}` }, what === "kept" ? "● kept" : "↻ recomputed")), make("td", { class: "name" }, code(name)),
      make("td", { class: "number" }, bytes(size)), make("td", { class: "number" }, time === null ? "not known" : seconds(time)),
      make("td", {}, source(where)))));
    more.hidden = shown.length === found.length;
    more.textContent = `show all ${found.length.toLocaleString("en")}`;
  }
  const sums = ["kept", "recomputed"].map((what) => {
    const mine = rows.filter((row) => row[0] === what);
    const time = mine.reduce((sum, row) => sum + (row[3] || 0), 0);
    return `${what}: ${count(mine.length, "tensor")}, ${bytes(mine.reduce((sum, row) => sum + row[2], 0))}, ${seconds(time)} to recompute`;
  });
  const search = make("input", { type: "search", placeholder: "filter by name, decision or source", "aria-label": "filter tensors", oninput: (event) => { wanted = event.target.value.toLowerCase(); draw(); } });
  draw();
  return [make("p", { class: "soft" }, sums.join("; ")), make("p", { class: "controls" }, search),
    make("div", { class: "scroll" }, make("table", { class: "decisions" }, make("thead", {}, make("tr", {}, headers)), body)), more];
}
