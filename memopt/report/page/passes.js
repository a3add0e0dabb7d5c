// The passes: what each changed, side by side, and what it refused. Lines are made when they are first looked at.
const MARKS = [["same", " "], ["moved", "↕"], ["changed", "~"], ["replaced", "⇄"], ["removed", "−"], ["added", "+"]];
const MOST_FOUND = 400;
const state = { all: false, wanted: "", redraw: [] };

function searchFor(name) {
  const box = document.getElementById("search");
  box.value = name;
  box.dispatchEvent(new Event("input"));
  box.focus();
  document.getElementById("passes").scrollIntoView();
}

function passesSection(passes) {
  const search = make("input", { type: "search", id: "search", placeholder: "search nodes, operators, modules, source lines, reasons", "aria-label": "search the passes", "aria-keyshortcuts": "/",
    oninput: (event) => { state.wanted = event.target.value.trim().toLowerCase(); redraw(); } });
  const found = make("span", { class: "soft", id: "found", role: "status" });
  const cards = passes.map((item) => passCard(item));
  function redraw() {
    const total = cards.reduce((sum, card) => sum + card.draw(), 0);
    found.textContent = state.wanted ? `${count(total, "line")} found` : "";
  }
  redraw();
  return section("passes", "Passes", data.about ? make("p", { class: "soft" }, data.about) : null,
    make("p", { class: "controls" }, search, choice(["changes only", "all nodes"], 0, (at) => { state.all = at === 1; redraw(); }), found),
    cards.map((card) => card.element));
}

function passCard(item) {
  const body = make("div", { class: "body" });
  const quiet = !item.changes.length && !item.refusals.length;
  const counts = tally(item.diff);
  const where = data.programs.length > 1 ? make("span", { class: "soft" }, data.programs[item.program].name) : null;
  const summary = make("summary", {}, make("b", {}, item.name), where,
    item.changes.length ? make("span", { class: "tag change" }, count(item.changes.length, "change")) : make("span", { class: "soft" }, "no change"),
    item.refusals.length ? make("span", { class: "tag refusal" }, count(item.refusals.length, "refusal")) : null,
    counts, make("span", { class: "soft push" }, `${item.nodes[0].toLocaleString("en")} → ${item.nodes[1].toLocaleString("en")} nodes · ${item.seconds}`));
  const element = make("details", { class: quiet ? "pass quiet" : "pass" }, summary, body);
  let opened = false;
  function fill() {
    opened = true;
    body.replaceChildren(...passBody(item));
  }
  element.addEventListener("toggle", () => { if (element.open && !opened) fill(); });
  function draw() {
    const matches = state.wanted ? countMatches(item) : 0;
    element.hidden = Boolean(state.wanted) && !matches;
    if (state.wanted && matches) element.open = true;
    if (element.open || opened) fill();
    return matches;
  }
  return { element, draw };
}

function tally(diff) {
  const sums = MARKS.map(() => 0);
  for (const group of diff) for (const row of group.rows) sums[row[0]] += group.blocks.length;
  const parts = [5, 4, 3, 2, 1].filter((kind) => sums[kind]).map((kind) => make("span", { class: `k-${MARKS[kind][0]}`, title: MARKS[kind][0] }, `${MARKS[kind][1]}${sums[kind]}`));
  return parts.length ? make("span", { class: "tally" }, parts) : null;
}

function matches(...words) {
  return words.some((word) => word.toLowerCase().includes(state.wanted));
}

function rowMatches(row) {
  return [row[1], row[2]].some((place) => {
    if (place < 0) return false;
    const node = nodeAt(place);
    return matches(node.name, node.operator, node.module, node.source, node.result);
  });
}

function countMatches(item) {
  let total = item.refusals.filter((row) => matches(...row)).length + item.changes.filter((row) => matches(row[0], ...row[1], ...row[2])).length;
  for (const group of item.diff) total += group.rows.filter((row) => (state.all || row[0]) && rowMatches(row)).length;
  return total + (matches(item.name) ? 1 : 0);
}

function passBody(item) {
  const parts = [];
  if (item.evidence) parts.push(make("p", {}, make("b", {}, "evidence: "), item.evidence));
  if (item.figures.length && item.diff.length) parts.push(table(["", "before", "after"], item.figures, [1, 2]));
  if (item.diff.length) parts.push(...diffGroups(item.diff));
  else if (!item.changes.length) parts.push(make("p", { class: "soft" }, "The graph is as it was."));
  const changes = state.wanted ? item.changes.filter((row) => matches(row[0], ...row[1], ...row[2])) : item.changes;
  const refusals = state.wanted ? item.refusals.filter((row) => matches(...row)) : item.refusals;
  if (changes.length) parts.push(folded(`what the pass says: ${count(changes.length, "change")}`, () => changeTable(changes)));
  if (refusals.length) parts.push(folded(`refused: ${count(refusals.length, "rewrite")}, with the reason`, () => refusalTable(refusals), true));
  if (item.unproved.length) parts.push(folded(`not proved: ${count(item.unproved.length, "region")}`, () => table(["region, and why it was not run"], item.unproved.map((line) => [line]))));
  return parts;
}

function folded(title, content, open = false) {
  const body = make("div");
  const element = make("details", { class: "inner", open }, make("summary", {}, title), body);
  let filled = false;
  const fill = () => { if (element.open && !filled) { filled = true; body.append(content()); } };
  element.addEventListener("toggle", fill);
  if (open) fill();
  return element;
}

function changeTable(changes) {
  return table(["what was done", "nodes before", "nodes after"], changes.map(([what, old, now]) => [what, code(old.join(", ")), code(now.join(", "))]));
}

// Reasons are often the same for every block: they are told once, with the nodes they are about.
function refusalTable(refusals) {
  const reasons = new Map();
  for (const [node, reason] of refusals) reasons.set(reason, [...(reasons.get(reason) || []), node]);
  return table(["why not", "times", "nodes"], [...reasons].map(([reason, members]) => [reason, `×${members.length}`, code(members.join(", "))]), [1]);
}

// -- the graph side by side ---------------------------------------------------------------------------------------------------

function diffGroups(groups) {
  let left = MOST_FOUND;
  const shown = [];
  for (const group of groups) {
    let rows = state.all ? group.rows : group.rows.filter((row) => row[0]);
    if (state.wanted) rows = rows.filter(rowMatches);
    if (!rows.length) continue;
    shown.push(groupElement(group, rows, state.wanted !== "" && left > 0));
    left -= rows.length;
  }
  return shown.length ? [make("div", { class: "groups" }, shown)] : [make("p", { class: "soft" }, state.wanted ? "No line of the graph fits." : "Only marks on nodes changed.")];
}

function groupElement(group, rows, open) {
  const times = group.blocks.length > 1 ? make("span", { class: "times", title: group.blocks.join(", ") }, `×${group.blocks.length}`) : null;
  const where = group.blocks.length > 1 ? `shown: ${group.blocks[0]}` : "";
  const body = make("div", { class: "diff", role: "table", "aria-label": `before and after in ${group.name || "the model"}` });
  const element = make("details", { class: "group", open }, make("summary", {}, code(group.name || "(no module)"), times,
    group.phase ? make("span", { class: "soft" }, group.phase) : null, tally([{ rows, blocks: [0] }]), where ? make("span", { class: "soft push" }, where) : null), body);
  let filled = false;
  const fill = () => { if (element.open && !filled) { filled = true; body.append(...rows.map((row) => diffRow(row, group.blocks[0]))); } };
  element.addEventListener("toggle", fill);
  fill();
  return element;
}

function diffRow(row, block) {
  const [kind, old, now, why] = row;
  const [word, mark] = MARKS[kind];
  const label = why ? `${word}: ${why}` : word;
  const lines = [old, now].map((place) => (place < 0 ? null : nodeLine(nodeAt(place)).call.split(", ")));
  return make("div", { class: `row ${word}`, role: "row" }, sideOf(old, block, lines[0], lines[1]),
    make("span", { class: "mark", role: "cell", title: label, "aria-label": label }, mark), sideOf(now, block, lines[1], lines[0]));
}

function sideOf(place, block, words, others) {
  if (place < 0) return make("div", { class: "side empty", role: "cell" });
  const node = nodeAt(place);
  const inner = node.module.startsWith(`${block}.`) ? node.module.slice(block.length + 1) : node.module === block ? "" : node.module;
  return make("div", { class: "side", role: "cell" },
    make("code", {}, make("b", {}, node.name), node.result ? make("span", { class: "type" }, `: ${node.result}`) : null, " = ", wordsOf(words, others)),
    make("small", {}, inner, inner && node.source ? " · " : "", node.source ? source(node.source) : null));
}

// Arguments that differ from the other side's are marked; of a long list the others are left out.
function wordsOf(words, others) {
  const alike = others && others.length === words.length;
  const differs = (at) => alike && words[at] !== others[at];
  const short = words.length > 24;
  const parts = [];
  let hidden = 0;
  words.forEach((word, at) => {
    if (short && !differs(at) && at > 3 && at < words.length - 1) {
      hidden += 1;
      return;
    }
    if (hidden) parts.push(`… ${hidden} more, `);
    hidden = 0;
    parts.push(differs(at) ? make("mark", {}, word) : word, at < words.length - 1 ? ", " : "");
  });
  return parts;
}
