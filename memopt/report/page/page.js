// The page: the summary first, then memory, price, and what each pass did.
function themeButton() {
  const dark = () => {
    const set = document.documentElement.dataset.theme;
    return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const button = make("button", { type: "button", id: "theme", onclick: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; label(); } });
  const label = () => { button.textContent = dark() ? "☀ light" : "☾ dark"; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
  label();
  return button;
}

function summarySection() {
  const cards = data.cards.map((item) => make("div", { class: `card ${item.tone}` }, make("dt", {}, item.label),
    make("dd", {}, item.value, item.note ? make("small", {}, `${item.tone === "bad" ? "✕ " : item.tone === "good" ? "✓ " : ""}${item.note}`) : null)));
  return make("section", { id: "summary", "aria-label": "summary" }, make("dl", { class: "cards" }, cards),
    data.notes.map((note) => make("p", { class: "note" }, note)));
}

function programSections(program, at) {
  const parts = [];
  const title = data.programs.length > 1 ? ` of ${program.name}` : "";
  if (program.lines.some((line) => line.length)) {
    parts.push(section(`memory-${at}`, `Memory over time${title}`, make("p", { class: "soft" }, `${program.kind}, ${count(program.nodes, "operation")}${program.note ? `: ${program.note}` : ""}`), timelineChart(program, data.budget)));
  }
  if (program.arena) parts.push(section(`arena-${at}`, `The arena${title}`, arenaChart(program.arena)));
  if (program.decisions.length) parts.push(section(`decisions-${at}`, `Kept or recomputed${title}`, decisionTable(program.decisions)));
  return parts;
}

// One with lines of code is stacked where the page is narrow.
function plainTable(item) {
  const rows = item.rows.map((row) => row.map((cell, at) => (item.sources.includes(at) && cell ? source(cell) : cell)));
  return table(item.head, rows, item.numbers, item.sources.length ? "stacked" : null);
}

function build() {
  const parts = [summarySection()];
  if (data.breakdown.length) parts.push(section("breakdown", data.breakdown_title, breakdownChart(data.breakdown)));
  if (data.steps && data.steps.length) parts.splice(1, 0, section("steps", "Memory of each step", stepsChart(data.steps)));
  data.programs.forEach((program, at) => parts.push(...programSections(program, at)));
  if (data.curve.length > 1) parts.splice(2, 0, section("curve", "What more or less memory would cost", curveLegend(), curveChart(data.curve, data.budget)));
  data.tables.forEach((item, at) => parts.push(section(`table-${at}`, item.title, plainTable(item))));
  if (data.passes.length) parts.push(passesSection(data.passes));
  const links = parts.slice(1).map((part) => make("a", { href: `#${part.id}` }, part.dataset.short));
  document.getElementById("page").append(
    make("header", {}, make("div", {}, make("h1", {}, data.title), make("p", { class: "soft" }, data.subtitle)), themeButton()),
    make("nav", { "aria-label": "sections" }, links), ...parts,
    make("footer", { class: "soft" }, `memopt. This page is complete in itself: nothing is loaded.${data.passes.length ? " Press / to search." : ""}`));
  document.addEventListener("keydown", (event) => {
    const box = document.getElementById("search");
    if (event.key === "/" && box && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      box.focus();
    }
  });
}

function curveLegend() {
  const chosen = data.curve.some((point) => point[3]);
  return make("p", { class: "legend" }, make("span", {}, make("span", { class: "swatch line after" }), "plans that were found"),
    chosen ? make("span", {}, make("span", { class: "swatch dot" }), "the chosen one") : null,
    data.budget === null ? null : make("span", {}, make("span", { class: "swatch line budget" }), `budget ${bytes(data.budget)}`));
}

build();
