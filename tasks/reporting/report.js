// The report's curves with zoom, and its samples with a filter. Without scripts the page shows the pictures that it was written with.
//
//   #data ──► view {from, to, text, phase, outcome, source, order} ──► charts of the steps from..to, samples that fit
//               ▲      │
//               └──────┴── the address's #..., so that a page that reloads while its run goes on stays as it was
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const W = 560, H = 230, LEFT = 56, RIGHT = 52, TOP = 10, BOTTOM = 34, BUCKETS = 250, PAGE = 25, RELOAD_MS = 20000;
  const first = data.steps.length ? data.steps[0] : 0, last = data.steps.length ? data.steps.at(-1) : 0;
  const view = {from: first, to: last, text: "", phase: "", outcome: "", source: "", order: "newest", ...read()};
  let shown = PAGE;

  function read() {
    const said = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    for (const key of ["from", "to"]) {
      if (key in said) said[key] = Math.min(last, Math.max(first, Number(said[key]) || 0));
    }
    return said;
  }

  function remember() {
    const kept = Object.entries(view).filter(([key, value]) => value !== {from: first, to: last, order: "newest"}[key] && value !== "");
    history.replaceState(null, "", "#" + new URLSearchParams(kept));
  }

  // ---- curves ----

  const element = (name, attributes = {}, text = "") => {
    const made = document.createElementNS(document.querySelector("svg").namespaceURI, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.textContent = text;
    return made;
  };
  const short = (value) => {
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 9.995e-4)) return value.toExponential(1).replace("e+", "e");
    for (const [power, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= power) return Number((value / (suffix === "k" ? 1e3 : power)).toPrecision(3)) + suffix;
    }
    return String(size >= 1000 ? Math.round(value) : Number(value.toPrecision(3)));
  };

  function linear(low, high, most) {
    if (high <= low) {
      const room = Math.abs(low) * 0.1 || 1;
      [low, high] = low >= 0 ? [0, low + room] : [low - room, high + room];
    }
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * (1 - 1e-9));
    const begin = Math.floor(low / step + 1e-9), end = Math.ceil(high / step - 1e-9);
    const ticks = Array.from({length: end - begin + 1}, (_, index) => (begin + index) * step);
    return {ticks, place: (value) => (value - begin * step) / ((end - begin) * step)};
  }

  function decades(low, high) {
    const begin = Math.floor(Math.log10(low)), end = Math.max(Math.ceil(Math.log10(high)), begin + 1), every = Math.ceil((end - begin) / 5);
    const ticks = [];
    for (let power = begin; power <= end; power += every) ticks.push(10 ** power);
    return {ticks, place: (value) => (Math.log10(value) - begin) / (end - begin)};
  }

  const across = (step) => LEFT + (view.to > view.from ? (step - view.from) / (view.to - view.from) : 0.5) * (W - LEFT - RIGHT);
  const down = (place) => H - BOTTOM - place * (H - BOTTOM - TOP);

  function points(line) {
    const found = [];
    data.steps.forEach((step, index) => {
      if (step >= view.from && step <= view.to && line.values[index] !== null) found.push([step, line.values[index]]);
    });
    return found;
  }

  // Of each run of steps that would share a pixel or two: the lowest and the highest, so that no spike is lost.
  function thinned(found) {
    const size = Math.ceil(found.length / BUCKETS);
    if (size < 3) return found;
    const kept = [];
    for (let start = 0; start < found.length; start += size) {
      const part = found.slice(start, start + size), values = part.map((point) => point[1]);
      const ends = [values.indexOf(Math.min(...values)), values.indexOf(Math.max(...values))].sort((a, b) => a - b);
      kept.push(...[...new Set(ends)].map((index) => part[index]));
    }
    return kept;
  }

  function draw(figure, chart) {
    const lines = chart.lines.map((line) => ({...line, points: points(line)})).filter((line) => line.points.length);
    const svg = figure.querySelector("svg");
    if (!svg) return;
    svg.replaceChildren();
    if (!lines.length) {
      svg.append(element("text", {class: "tick", x: W / 2, y: H / 2, "text-anchor": "middle"}, "no values in these steps"));
      return;
    }
    const values = lines.flatMap((line) => line.points.map((point) => point[1]));
    const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
    const bounds = chart.bounds || [low, high];
    const y = chart.log && low > 0 ? decades(low, high) : linear(Math.min(low, bounds[0]), Math.max(high, bounds[1]), 6);
    for (const tick of y.ticks) {
      svg.append(element("path", {class: "grid", d: `M${LEFT} ${down(y.place(tick))}H${W - RIGHT}`}));
      svg.append(element("text", {class: "tick", x: LEFT - 7, y: down(y.place(tick)) + 4, "text-anchor": "end"}, short(tick)));
    }
    svg.append(element("path", {class: "base", d: `M${LEFT} ${H - BOTTOM}H${W - RIGHT}`}));
    const steps = view.to > view.from ? linear(view.from, view.to, 8).ticks : [view.from];
    for (const tick of steps.filter((one) => Number.isInteger(one) && one >= view.from && one <= view.to)) {
      svg.append(element("text", {class: "tick", x: across(tick), y: H - BOTTOM + 16, "text-anchor": "middle"}, tick));
    }
    svg.append(element("text", {class: "tick", x: (LEFT + W - RIGHT) / 2, y: H - 3, "text-anchor": "middle"}, "step"));
    for (const line of lines) {
      const path = thinned(line.points).map(([step, value]) => `${across(step).toFixed(1)} ${down(y.place(value)).toFixed(1)}`);
      svg.append(element("path", {class: `line s${line.color}${line.points.length > 200 ? " thin" : ""}`, d: "M" + path.join("L")}));
      if (line.points.length <= 40) {
        for (const [step, value] of line.points) {
          svg.append(element("circle", {class: `dot s${line.color}`, cx: across(step), cy: down(y.place(value)), r: 3.5}));
        }
      }
    }
    const ends = lines.map((line) => [down(y.place(line.points.at(-1)[1])), line]).sort((a, b) => a[0] - b[0]);
    ends.forEach((end, index) => { if (index) end[0] = Math.max(end[0], ends[index - 1][0] + 13); });
    const over = Math.max(0, ends.at(-1)[0] - (H - BOTTOM));
    for (const [place, line] of ends) {
      const [step, value] = line.points.at(-1);
      svg.append(element("text", {class: "end", x: across(step) + 7, y: place - over + 4, "text-anchor": "start"}, short(value)));
    }
  }

  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => [figure, data.charts[figure.dataset.chart]]);

  function step(event, svg) {
    const box = svg.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT);
    return Math.round(view.from + Math.min(1, Math.max(0, place)) * (view.to - view.from));
  }

  for (const [figure, chart] of figures) {
    const svg = figure.querySelector("svg"), told = figure.querySelector("output");
    if (!svg) continue;
    let began = null, band = null;
    svg.addEventListener("pointerdown", (event) => {
      began = step(event, svg);
      band = element("rect", {class: "band", y: TOP, height: H - BOTTOM - TOP});
      svg.append(band);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const here = step(event, svg);
      if (band) {
        band.setAttribute("x", across(Math.min(began, here)));
        band.setAttribute("width", Math.abs(across(here) - across(began)));
      }
      const index = data.steps.reduce((best, one, at) => Math.abs(one - here) < Math.abs(data.steps[best] - here) ? at : best, 0);
      const values = chart.lines.filter((line) => line.values[index] !== null).map((line) => `${line.label} ${short(line.values[index])}`);
      told.textContent = `step ${data.steps[index]}: ${values.join(", ") || "no value"}`;
    });
    svg.addEventListener("pointerup", (event) => {
      const ended = step(event, svg);
      band.remove();
      if (Math.abs(ended - began) >= 1) zoom(Math.min(began, ended), Math.max(began, ended));
      began = band = null;
    });
    svg.addEventListener("pointerleave", () => { if (!band) told.textContent = ""; });
    svg.addEventListener("dblclick", () => zoom(first, last));
  }

  function zoom(from, to) {
    [view.from, view.to] = from <= to ? [from, to] : [to, from];
    render();
  }

  // ---- samples ----

  const list = document.getElementById("samples"), more = document.getElementById("more"), count = document.getElementById("count");
  const orders = {
    newest: (a, b) => b.step - a.step,
    lowest: (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity),
    highest: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
    longest: (a, b) => (b.tokens ?? 0) - (a.tokens ?? 0),
  };

  function fits(sample) {
    const words = view.text.toLowerCase();
    return sample.step >= view.from && sample.step <= view.to
      && ["phase", "outcome", "source"].every((key) => !view[key] || sample[key] === view[key])
      && (!words || ["prompt", "response", "answer", "error", "uid"].some((key) => (sample[key] ?? "").toLowerCase().includes(words)));
  }

  function cell(text, kind) {
    const made = document.createElement("td"), inner = document.createElement("div");
    inner.className = kind;
    inner.textContent = text;
    made.append(inner);
    return made;
  }

  function tell() {
    if (!list) return;
    const found = data.samples.filter(fits).sort(orders[view.order] ?? orders.newest);
    list.replaceChildren(...found.slice(0, shown).map((sample) => {
      const row = document.createElement("tr");
      const parts = Object.entries(sample.rewards ?? {}).map(([label, value]) => `${label} ${value === null ? "–" : value.toFixed(3)}`);
      const notes = [sample.truncated ? "truncated" : "", (sample.outcome ?? "scored") === "scored" ? "" : `${sample.outcome.replaceAll("_", " ")}: ${sample.error}`];
      row.append(cell(`${sample.step} ${sample.phase}`, "num"), cell(sample.prompt, "said"), cell(sample.answer, "said"), cell(sample.response, "said"));
      const reward = sample.reward === null ? "–" : sample.reward.toFixed(3);
      row.append(cell([reward, ...(parts.length > 1 ? parts : []), ...notes].filter(Boolean).join(" · "), "num wrap"));
      return row;
    }));
    count.textContent = `${Math.min(shown, found.length)} of ${found.length} samples that fit` + (data.left_out ? `; ${data.left_out} more are in samples.jsonl` : "");
    more.hidden = found.length <= shown;
  }

  // ---- controls ----

  function render() {
    for (const control of document.querySelectorAll("[data-view]")) {
      if (control !== document.activeElement) control.value = view[control.dataset.view];
    }
    for (const [figure, chart] of figures) draw(figure, chart);
    tell();
    remember();
  }

  for (const control of document.querySelectorAll("[data-view]")) {
    const key = control.dataset.view;
    if (control.tagName === "SELECT" && key !== "order") {
      for (const value of [...new Set(data.samples.map((sample) => sample[key]))].filter(Boolean).sort()) {
        control.append(new Option(value.replaceAll("_", " "), value));
      }
    }
    control.addEventListener("input", () => {
      shown = PAGE;
      if (key !== "from" && key !== "to") {
        view[key] = control.value;
        render();
      } else if (control.value !== "") {
        const value = Math.min(last, Math.max(first, Number(control.value)));
        zoom(key === "from" ? value : view.from, key === "to" ? value : view.to);
      }
    });
  }
  for (const button of document.querySelectorAll("[data-all]")) button.addEventListener("click", () => zoom(first, last));
  if (more) more.addEventListener("click", () => { shown += PAGE; tell(); });
  for (const hidden of document.querySelectorAll(".scripted")) hidden.hidden = false;
  render();
  if (data.running) {
    setInterval(() => {
      if (!document.hidden && !["INPUT", "SELECT"].includes(document.activeElement.tagName)) location.reload();
    }, RELOAD_MS);
  }
})();
