// What all parts of the page share: elements, numbers in words, nodes of graphs. Names only ever become text.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes, ...children) {
  const svg = make.svg.has(tag);
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}
make.svg = new Set(["svg", "g", "path", "line", "rect", "circle", "text", "title", "polyline", "polygon", "defs", "pattern"]);

function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (power < units.length - 1 && Math.round(Math.abs(size) / 1000 ** power * 100) >= 100000) power += 1;
  return power ? `${(size / 1000 ** power).toFixed(2)} ${units[power]}` : `${size} B`;
}

function seconds(value) {
  for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 2)} ${unit}`;
  }
  return value ? `${Math.round(value * 1e9)} ns` : "0 s";
}

function count(number, word) {
  return `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
}

// The least of 1, 2, 5 times a power of ten that is not below the value.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= value * (1 - 1e-9));
}

// -- nodes of graphs: a row of the table is decoded when it is first shown ---------------------------------------------

const nodes = new Map();

function nodeAt(place) {
  if (!nodes.has(place)) {
    const row = data.nodes[place];
    const [id, name, operator, text, result, module, source] = row.slice(0, 7).map((at) => data.strings[at]);
    nodes.set(place, {
      id, name, operator, text, result, module, source, phase: ["", "forward", "backward"][row[7]],
      flops: row[8], moved: row[9], inputs: row[10].map((at) => data.strings[at]),
    });
  }
  return nodes.get(place);
}

function nodeLine(node) {
  const args = node.text.replace(/%(%|\d+)/g, (_, which) => (which === "%" ? "%" : node.inputs[Number(which)]));
  return { head: node.name, type: node.result, call: `${node.operator}${args}` };
}

const graphs = new Map();

function graphAt(place) {
  if (place === null) return null;
  if (!graphs.has(place)) {
    const row = data.graphs[place];
    const members = row.nodes.map(nodeAt);
    const resting = new Set(["parameter", "buffer", "constant", "input", "tangent", "output", "getitem"]);
    graphs.set(place, {
      steps: members.filter((node) => !resting.has(node.operator)),
      byId: new Map(members.map((node) => [node.id, node])),
      storages: row.storages.map(([id, size, start, end]) => ({ id: data.strings[id], size, start, end })),
    });
  }
  return graphs.get(place);
}

// -- pieces of the page ---------------------------------------------------------------------------------------------------

function section(id, title, ...children) {
  const short = { breakdown: "Bytes", curve: "Memory and time", passes: "Passes" }[id] || title.replace(/ of .*| at .*/, "");
  return make("section", { id, "aria-labelledby": `${id}-title`, "data-short": short }, make("h2", { id: `${id}-title` }, title), ...children);
}

function table(head, rows, numbers = [], kind = null) {
  const cells = (tag, row) => row.map((cell, at) => make(tag, { class: numbers.includes(at) ? "number" : null, scope: tag === "th" ? "col" : null }, cell));
  return make("div", { class: "scroll" }, make("table", { class: kind },
    make("thead", {}, make("tr", {}, cells("th", head))),
    make("tbody", {}, rows.map((row) => make("tr", {}, cells("td", row))))));
}

function code(text) {
  return make("code", {}, text);
}

// `folder/file.py:line, code` of a source line; the whole path is said on hover.
function source(text) {
  const [, folders, rest] = /^((?:[^,]*[/\\])?)([^,]*[/\\][^,/\\]*:\d+.*)$/s.exec(text) || [null, "", text];
  return make("code", { class: "source", title: folders ? text : null }, rest);
}

// A button that says by aria-pressed which of several ways is shown.
function choice(labels, chosen, changed) {
  const buttons = labels.map((label, at) => make("button", { type: "button", "aria-pressed": String(at === chosen), onclick: () => pick(at) }, label));
  function pick(at) {
    buttons.forEach((button, other) => button.setAttribute("aria-pressed", String(other === at)));
    changed(at);
  }
  return make("span", { class: "choice", role: "group" }, buttons);
}

// Moves a place along by the keys of a slider; says whether the key was one.
function sliderKey(event, place, last, more = {}) {
  const page = Math.max(1, Math.round(last / 20));
  const to = { ArrowLeft: place - 1, ArrowDown: place - 1, ArrowRight: place + 1, ArrowUp: place + 1, PageUp: place + page, PageDown: place - page, Home: 0, End: last, ...more }[event.key];
  if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return null;
  event.preventDefault();
  return Math.min(last, Math.max(0, to));
}
