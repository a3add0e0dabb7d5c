// Drawings: axes, the budget-time curve, where the bytes go, and the arena.
// Units of a drawing: as many as the page has pixels, so that its words are as large as the text.
const WIDTH = Math.max(320, Math.min(1180, document.documentElement.clientWidth - 30));

function frame(height, left, bottom, label, attributes) {
  return {
    svg: make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, "aria-label": label, ...attributes }),
    left, right: WIDTH - 14, top: 14, bottom: height - bottom,
  };
}

function byteScale(top) {
  const units = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]];
  return units.find(([, size]) => top >= size) || units[3];
}

// Horizontal lines at round numbers of bytes.
function byteAxis(area, top, y) {
  const [unit, size] = byteScale(top);
  const step = roundUp(top / size / 5);
  const parts = [];
  for (let number = 0; number * step * size <= top; number += 1) {
    const at = y(number * step * size).toFixed(1);
    parts.push(make("line", { class: "grid", x1: area.left, x2: area.right, y1: at, y2: at }));
    parts.push(make("text", { class: "tick end", x: area.left - 8, y: Number(at) + 4 }, `${Number((number * step).toPrecision(6))} ${unit}`));
  }
  return parts;
}

// Vertical lines at round numbers of seconds.
function timeAxis(area, end, across) {
  const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6], ["ns", 1e-9]].find(([, size]) => end >= size) || ["s", 1];
  const step = roundUp(end / size / (WIDTH / 130));
  const parts = [];
  for (let number = 0; number * step * size <= end; number += 1) {
    const at = across(number * step * size).toFixed(1);
    parts.push(make("line", { class: "grid", x1: at, x2: at, y1: area.top, y2: area.bottom }),
      make("text", { class: "tick middle", x: at, y: area.bottom + 17 }, `${Number((number * step).toPrecision(6))} ${unit}`));
  }
  return parts;
}

// -- budget and time --------------------------------------------------------------------------------------------------------

function curveChart(points, budget) {
  const area = frame(300, 74, 44, "", { tabindex: 0, role: "slider", class: "chart", "aria-valuemin": 0, "aria-valuemax": points.length - 1 });
  const sizes = points.map((point) => point[0]);
  const [low, high] = [Math.min(...sizes), Math.max(...sizes)];
  const margin = (high - low || high || 1) * 0.05;
  const top = Math.max(0.01, ...points.map((point) => point[2])) * 1.1;
  const x = (size) => area.left + (size - low + margin) / (high - low + 2 * margin) * (area.right - area.left);
  const y = (share) => area.bottom - share / top * (area.bottom - area.top);
  const step = roundUp(top / 5);
  for (let at = 0; at <= top; at += step) {
    area.svg.append(make("line", { class: "grid", x1: area.left, x2: area.right, y1: y(at), y2: y(at) }),
      make("text", { class: "tick end", x: area.left - 8, y: y(at) + 4 }, `+${Number((at * 100).toPrecision(3))} %`));
  }
  const [unit, size] = byteScale(high);
  const distance = roundUp((high - low + 2 * margin) / size / (WIDTH / 130)) * size;
  for (let at = Math.ceil((low - margin) / distance) * distance; at <= high + margin; at += distance) {
    area.svg.append(make("line", { class: "grid", x1: x(at), x2: x(at), y1: area.top, y2: area.bottom }),
      make("text", { class: "tick middle", x: x(at), y: area.bottom + 17 }, `${Number((at / size).toPrecision(6))} ${unit}`));
  }
  area.svg.append(make("text", { class: "tick end", x: area.right, y: area.bottom + 36 }, "peak of the whole step, everything resident included"));
  area.svg.append(make("polyline", { class: "after", points: points.map((p) => `${x(p[0]).toFixed(1)},${y(p[2]).toFixed(1)}`).join(" ") }));
  if (budget !== null && budget >= low - margin && budget <= high + margin) {
    area.svg.append(make("line", { class: "budget", x1: x(budget), x2: x(budget), y1: area.top, y2: area.bottom }));
  }
  for (const point of points) {
    area.svg.append(make("circle", { class: point[3] ? "chosen" : "point", cx: x(point[0]), cy: y(point[2]), r: point[3] ? 7 : 3 }));
  }
  const mark = make("circle", { class: "cursor", r: 6 });
  area.svg.append(mark);
  const words = make("p", { class: "readout", "aria-live": "polite" });
  let place = Math.max(0, points.findIndex((point) => point[3]));
  function show(at) {
    place = at;
    const [bytesAt, time, extra, chosen] = points[at];
    const text = `${bytes(bytesAt)}: ${seconds(time)} a step, +${(extra * 100).toFixed(1)} %${chosen ? " (chosen)" : ""}`;
    mark.setAttribute("cx", x(bytesAt));
    mark.setAttribute("cy", y(extra));
    words.replaceChildren(text);
    area.svg.setAttribute("aria-valuenow", at);
    area.svg.setAttribute("aria-valuetext", text);
  }
  area.svg.addEventListener("keydown", (event) => {
    const to = sliderKey(event, place, points.length - 1, { ArrowLeft: place + 1, ArrowRight: place - 1 }); // bytes fall
    if (to !== null) show(to);
  });
  area.svg.addEventListener("pointermove", (event) => {
    const at = pointerX(area.svg, event);
    show(points.reduce((best, point, index) => (Math.abs(x(point[0]) - at) < Math.abs(x(points[best][0]) - at) ? index : best), 0));
  });
  area.svg.setAttribute("aria-label", "time added over the peak of a step: plans that were found");
  show(place);
  return [area.svg, words];
}

function pointerX(svg, event) {
  const box = svg.getBoundingClientRect();
  return (event.clientX - box.left) / box.width * WIDTH;
}

// -- where the bytes go -----------------------------------------------------------------------------------------------------

function breakdownChart(rows) {
  const total = rows[rows.length - 1][1];
  const parts = rows.slice(0, -1).map(([name, size], at) => ({ name, size, kind: `part p${at}` })).filter((part) => part.size > 0);
  const svg = make("svg", { viewBox: `0 0 ${WIDTH} 34`, role: "img", class: "bar", "aria-label": `${bytes(total)} at the predicted peak`, preserveAspectRatio: "none" });
  let from = 0;
  for (const part of parts) {
    svg.append(make("rect", { class: part.kind, x: from / total * WIDTH, width: part.size / total * WIDTH, y: 0, height: 34 },
      make("title", {}, `${part.name}: ${bytes(part.size)}`)));
    from += part.size;
  }
  const legend = make("ul", { class: "parts" }, parts.map((part) => make("li", {},
    make("span", { class: `swatch ${part.kind}` }), make("span", {}, part.name), make("b", {}, bytes(part.size)),
    make("span", { class: "soft" }, `${(part.size / total * 100).toFixed(1)} %`))));
  return [svg, legend];
}

// -- the arena: time from left to right, addresses upwards ------------------------------------------------------------------

function arenaChart(arena) {
  const inside = arena.blocks.filter((block) => block[1] === 0 && block[2] > 0);
  const label = `arena of ${bytes(arena.bytes)}: time by address, ${count(inside.length, "block")}`;
  const area = frame(440, 84, 30, label, { tabindex: 0, role: "application", class: "chart arena" });
  const top = Math.max(1, arena.bytes) * 1.03;
  const x = (step) => area.left + step / Math.max(1, arena.steps) * (area.right - area.left);
  const y = (address) => area.bottom - address / top * (area.bottom - area.top);
  area.svg.append(...byteAxis(area, top, y));
  const marks = inside.map((block) => {
    const [, , size, start, end, offset, holds, scratch] = block;
    return make("rect", {
      class: scratch ? "block scratch" : holds.length > 1 ? "block shared" : "block value",
      x: x(start).toFixed(2), y: y(offset + size).toFixed(2),
      width: Math.max(0.5, x(end) - x(start)).toFixed(2), height: Math.max(0.5, y(offset) - y(offset + size)).toFixed(2),
    });
  });
  area.svg.append(...marks);
  const bound = y(arena.bound);
  area.svg.append(make("line", { class: "bound", x1: area.left, x2: area.right, y1: bound, y2: bound }),
    make("text", { class: "tick", x: area.left + 6, y: bound - 5 }, `lower bound ${bytes(arena.bound)}`),
    make("text", { class: "tick end", x: area.right, y: area.bottom + 20 }, `${count(arena.steps, "operation")}, in order`));
  const words = make("p", { class: "readout", "aria-live": "polite" }, "Point at a block, or press the arrow keys.");
  let place = -1;
  function show(at) {
    if (place >= 0) marks[place].classList.remove("chosen");
    place = at;
    marks[at].classList.add("chosen");
    const [name, , size, start, end, offset, holds, scratch] = inside[at];
    words.replaceChildren(code(scratch ? `scratch of ${name}` : holds.join(", ") || name),
      ` ${bytes(size)} at address ${offset.toLocaleString("en")}, operations ${start} to ${end - 1}`);
  }
  marks.forEach((mark, at) => mark.addEventListener("pointerenter", () => show(at)));
  area.svg.addEventListener("keydown", (event) => {
    const to = inside.length ? sliderKey(event, place, inside.length - 1) : null;
    if (to !== null) show(to);
  });
  const outside = arena.blocks.filter((block) => block[1] !== 0 && block[2] > 0);
  const kinds = [["value", "one value"], ["shared", "several values in one block"], ["scratch", "scratch"]];
  const legend = make("p", { class: "legend" }, kinds.map(([kind, text]) => make("span", {}, make("span", { class: `swatch block ${kind}` }), text)),
    make("span", {}, make("span", { class: "swatch bound" }), "lower bound"));
  const proof = arena.bytes === arena.bound ? "no smaller arena is possible" : `${((arena.bytes / arena.bound - 1) * 100).toFixed(1)} % above the lower bound`;
  const beside = outside.length ? ` Beside it: ${count(outside.length, "block")} of results and of operators that allocate for themselves.` : "";
  return [make("p", { class: "soft" }, `${bytes(arena.bytes)}: ${proof}.${beside}`), legend, area.svg, words];
}
