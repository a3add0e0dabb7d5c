// The steps of a loop, as a monitor saw them: what was held, the peak, and what was reserved.

function stepsChart(steps) {
  const area = frame(300, 74, 34, "memory of each step", { tabindex: 0, role: "slider", class: "chart", "aria-valuemin": 0, "aria-valuemax": steps.length - 1 });
  const reserved = steps.some((step) => step[4] !== null);
  const top = Math.max(1, ...steps.map((step) => Math.max(step[2], step[3], step[4] || 0))) * 1.08;
  const x = (at) => (steps.length > 1 ? area.left + at / (steps.length - 1) * (area.right - area.left) : (area.left + area.right) / 2);
  const y = (size) => area.bottom - size / top * (area.bottom - area.top);
  const line = (of) => steps.map((step, at) => `${x(at).toFixed(1)},${y(step[of]).toFixed(1)}`).join(" ");
  area.svg.append(...byteAxis(area, top, y),
    make("text", { class: "tick end", x: area.right, y: area.bottom + 22 }, `${count(steps.length, "step")}, in order`),
    make("polygon", { class: "area", points: `${x(0)},${y(0)} ${line(3)} ${x(steps.length - 1)},${y(0)}` }),
    make("polyline", { class: "before", points: line(3) }), make("polyline", { class: "after", points: line(2) }));
  if (reserved) area.svg.append(make("polyline", { class: "budget", fill: "none", points: line(4) }));
  const marks = [2, 3].map(() => make("circle", { class: "cursor", r: 5 }));
  area.svg.append(...marks);
  const words = make("p", { class: "readout", "aria-live": "polite" });
  let place = 0;
  function show(at) {
    place = at;
    const [number, before, peak, after, held, time] = steps[at];
    marks.forEach((mark, which) => { mark.setAttribute("cx", x(at)); mark.setAttribute("cy", y(which ? after : peak)); });
    const text = `step ${number}: ${bytes(before)} before, peak ${bytes(peak)}, ${bytes(after)} after${held === null ? "" : `, ${bytes(held)} reserved`}; ${seconds(time)}`;
    words.replaceChildren(text);
    area.svg.setAttribute("aria-valuenow", at);
    area.svg.setAttribute("aria-valuetext", text);
  }
  area.svg.addEventListener("keydown", (event) => {
    const to = sliderKey(event, place, steps.length - 1);
    if (to !== null) show(to);
  });
  area.svg.addEventListener("pointermove", (event) => {
    const share = (pointerX(area.svg, event) - area.left) / (area.right - area.left);
    show(Math.min(steps.length - 1, Math.max(0, Math.round(share * (steps.length - 1)))));
  });
  show(steps.reduce((best, step, at) => (step[2] > steps[best][2] ? at : best), 0));
  const legend = make("p", { class: "legend" }, make("span", {}, make("span", { class: "swatch line after" }), "peak"),
    make("span", {}, make("span", { class: "swatch line before" }), "held after the step"),
    reserved ? make("span", {}, make("span", { class: "swatch line budget" }), "reserved by the allocator") : null);
  return [legend, area.svg, words];
}
