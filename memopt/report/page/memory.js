// The memory of a program over time, with what is alive at the cursor; and what was decided for each tensor.
const SHOWN = 12;

function timelineChart(program, budget) {
  const [before, after] = program.lines;
  const scale = stepScale(program);
  const top = Math.max(...before, ...after, budget || 0, 1) * 1.08;
  const label = `memory of ${program.name} over its operations`;
  const area = frame(320, 74, scale.bottom, label, { tabindex: 0, role: "slider", class: "chart", "aria-valuemin": 0 });
  const across = (begin) => area.left + begin / scale.end * (area.right - area.left);
  const x = (side, step) => across(scale.begins[side][step]);
  const y = (size) => area.bottom - size / top * (area.bottom - area.top);
  area.svg.append(...byteAxis(area, top, y), ...scale.axis(area, across));
  const stairs = (values, side) => values.map((value, at) => `${x(side, at).toFixed(1)},${y(value).toFixed(1)} ${x(side, at + 1).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  if (after.length) {
    area.svg.append(make("polygon", { class: "area", points: `${x(1, 0)},${y(0)} ${stairs(after, 1)} ${x(1, after.length)},${y(0)}` }),
      make("polyline", { class: "after", points: stairs(after, 1) }));
  }
  if (before.length) area.svg.append(make("polyline", { class: "before", points: stairs(before, 0) }));
  if (budget !== null) area.svg.append(make("line", { class: "budget", x1: area.left, x2: area.right, y1: y(budget), y2: y(budget) }));
  if (program.forward > 0 && program.forward < after.length) {
    const at = x(1, program.forward);
    area.svg.append(make("line", { class: "boundary", x1: at, x2: at, y1: area.top, y2: area.bottom }),
      make("text", { class: "tick end", x: at - 6, y: area.top + 10 }, "forward"), make("text", { class: "tick", x: at + 6, y: area.top + 10 }, "backward"));
  }
  const cursor = make("line", { class: "cursor", y1: area.top, y2: area.bottom });
  area.svg.append(cursor);

  const panel = make("div", { class: "alive", "aria-live": "off" });
  let side = after.length ? 1 : 0;
  let place = 0;
  const values = () => program.lines[side];
  const peak = () => values().indexOf(Math.max(...values()));
  function show(at) {
    place = Math.min(at, Math.max(0, values().length - 1));
    const middle = (x(side, place) + x(side, Math.min(place + 1, values().length))) / 2;
    cursor.setAttribute("x1", middle);
    cursor.setAttribute("x2", middle);
    const graph = graphAt(program.graphs[side]);
    const step = graph && graph.steps[place];
    const words = `operation ${place} of ${values().length}${step ? `, ${step.name}` : ""}: ${bytes(values()[place] || 0)}`;
    area.svg.setAttribute("aria-valuemax", Math.max(0, values().length - 1));
    area.svg.setAttribute("aria-valuenow", place);
    area.svg.setAttribute("aria-valuetext", words);
    panel.replaceChildren(...alive(graph, step, `Operation ${place}${scale.said(side, place)}`, place, values()[place] || 0, program.arena && side === 1).filter(Boolean));
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
    return scale.at(side, share * scale.end);
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

// Where operations lie from left to right: by the time that they take where that is known, else one beside the other.
function stepScale(program) {
  const timed = program.lines.every((line, side) => line.length === program.seconds[side].length) && program.seconds.some((line) => line.some((time) => time > 0));
  const begins = program.lines.map((line, side) => {
    const found = [0];
    line.forEach((_, at) => found.push(found[at] + (timed ? program.seconds[side][at] : 1)));
    return found;
  });
  const end = Math.max(...begins.map((found) => found[found.length - 1])) || 1;
  const operations = Math.max(...program.lines.map((line) => line.length));
  return {
    begins, end, bottom: timed ? 46 : 34,
    // The operation that runs at a moment.
    at(side, moment) {
      let [low, high] = [0, Math.max(0, program.lines[side].length - 1)];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (begins[side][middle + 1] > moment) high = middle;
        else low = middle + 1;
      }
      return low;
    },
    said: (side, place) => (timed ? `, at ${seconds(begins[side][place])}` : ""),
    axis(area, across) {
      const words = timed ? `time that the operators take, predicted; ${count(operations, "operation")}` : `${count(operations, "operation")}, in order`;
      return [...(timed ? timeAxis(area, end, across) : []), make("text", { class: "tick end", x: area.right, y: area.bottom + (timed ? 36 : 22) }, words)];
    },
  };
}

function timelineLegend(sides, before, budget) {
  return make("p", { class: "legend" }, make("span", {}, make("span", { class: "swatch line after" }), sides[1]),
    before ? make("span", {}, make("span", { class: "swatch line before" }), sides[0]) : null,
    budget === null ? null : make("span", {}, make("span", { class: "swatch line budget" }), `budget ${bytes(budget)}`));
}

function alive(graph, step, words, place, total, planned) {
  const title = make("h3", {}, `${words}: ${bytes(total)}`);
  if (!graph) return [title, make("p", { class: "soft" }, "This graph was not recorded.")];
  const there = graph.storages.filter((storage) => storage.start <= place && place < storage.end).sort((a, b) => b.size - a.size);
  const sum = there.reduce((whole, storage) => whole + storage.size, 0);
  const groups = [...Map.groupBy(there, (storage) => likeness(graph.byId.get(storage.id), storage.size)).values()]
    .map((members) => ({ members, size: members.length * members[0].size })).sort((a, b) => b.size - a.size);
  const rows = groups.slice(0, SHOWN).map(({ members, size }) => {
    const node = graph.byId.get(members[0].id);
    const span = [Math.min(...members.map((one) => one.start)), Math.max(...members.map((one) => one.end)) - 1];
    return [named(nodeButton(node), members.length), bytes(size), span.join("–"), code(members.length > 1 ? anyBlock(node.module) : node.module), source(node.source)];
  });
  const others = groups.slice(SHOWN);
  const number = others.reduce((whole, group) => whole + group.members.length, 0);
  const more = number ? make("p", { class: "soft" }, `and ${count(number, "smaller one")}, ${bytes(others.reduce((whole, group) => whole + group.size, 0))}`) : null;
  return [title,
    step ? make("p", {}, "runs ", code(`${step.name} = ${nodeLine(step).call}`), step.source ? make("span", { class: "soft" }, " ", source(step.source)) : null) : null,
    make("p", { class: "soft" }, `${count(there.length, "tensor")} alive, ${bytes(sum)}; ${planned ? "resident, and the arena around them" : "resident and workspace"} ${bytes(Math.max(0, total - sum))}`),
    rows.length ? table(["made by", "size", "alive in operations", "module", "source"], rows, [1, 2], "stacked") : null, more];
}

// Tensors that one line makes in each of many blocks are told in one row.
function likeness(node, size) {
  return [node.operator, size, node.source, node.phase, anyBlock(node.module)].join("\n");
}

function anyBlock(module) {
  return module.replace(/(?<![^.])\d+(?![^.])/g, "*");
}

function named(name, times, all = "") {
  return times > 1 ? make("span", {}, name, " ", make("span", { class: "times", title: all || null }, `×${times}`)) : name;
}

function nodeButton(node) {
  return make("button", { type: "button", class: "node", title: `search the passes for ${node.name}`, onclick: () => searchFor(node.name) }, node.name);
}

// -- decisions --------------------------------------------------------------------------------------------------------------

function decisionTable(rows) {
  const heads = ["decision", "tensor", "size", "to recompute", "module", "source"];
  const keys = [(row) => row[0], (row) => row[1][0], (row) => -row[2], (row) => -(row[3] || 0), (row) => row[4], (row) => row[5]];
  const numbers = [2, 3];
  let order = 2;
  let all = false;
  let wanted = "";
  const body = make("tbody");
  const more = make("button", { type: "button", onclick: () => { all = true; draw(); } });
  const headers = heads.map((head, at) => make("th", { scope: "col", class: numbers.includes(at) ? "number" : null },
    make("button", { type: "button", class: "sort", onclick: () => { order = at; draw(); } }, head)));
  function draw() {
    const found = rows.filter((row) => !wanted || `${row[0]} ${row[1].join(" ")} ${row[4]} ${row[5]}`.toLowerCase().includes(wanted));
    found.sort((a, b) => (keys[order](a) < keys[order](b) ? -1 : keys[order](a) > keys[order](b) ? 1 : 0));
    headers.forEach((head, at) => head.setAttribute("aria-sort", at === order ? (numbers.includes(at) ? "descending" : "ascending") : "none"));
    const shown = all ? found : found.slice(0, SHOWN);
    body.replaceChildren(...shown.map(([what, names, size, time, module, where]) => make("tr", {},
      make("td", {}, make("span", { class: `tag ${what}` }, what === "kept" ? "● kept" : "↻ recomputed")), make("td", { class: "name" }, named(code(names[0]), names.length, names.join(", "))),
      make("td", { class: "number" }, bytes(size)), make("td", { class: "number" }, time === null ? "not known" : seconds(time)),
      make("td", {}, code(module)), make("td", {}, source(where)))));
    more.hidden = shown.length === found.length;
    more.textContent = `show all ${found.length.toLocaleString("en")}`;
  }
  const sums = ["kept", "recomputed"].map((what) => {
    const mine = rows.filter((row) => row[0] === what);
    const time = mine.reduce((sum, row) => sum + (row[3] || 0), 0);
    const tensors = mine.reduce((sum, row) => sum + row[1].length, 0);
    return `${what}: ${count(tensors, "tensor")}, ${bytes(mine.reduce((sum, row) => sum + row[2], 0))}, ${seconds(time)} to recompute`;
  });
  const search = make("input", { type: "search", placeholder: "filter by name, module, decision or source", "aria-label": "filter tensors", oninput: (event) => { wanted = event.target.value.toLowerCase(); draw(); } });
  draw();
  return [make("p", { class: "soft" }, sums.join("; ")), make("p", { class: "controls" }, search),
    make("div", { class: "scroll" }, make("table", { class: "decisions stacked" }, make("thead", {}, make("tr", {}, headers)), body)), more];
}
