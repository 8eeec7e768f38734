"use strict";
/* Small charts in SVG: lines over steps, and bars of parts. All text goes in as text, never as markup. */

const COLOURS = ["#2563c9", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#846300", "#495057"];
const SVG = "http://www.w3.org/2000/svg";

/** Return a new element with properties, and children that are elements or texts. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("aria-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Return a number as people read it: few digits. */
function shortNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** Return ascending numbers with as few digits as tell them apart. */
function apartNumbers(values) {
  let texts = [];
  for (let digits = 4; digits <= 12; digits++) {
    texts = values.map((value) => shortNumber(value, digits));
    if (new Set(texts).size === texts.length) break;
  }
  return texts;
}

/** Return about `wanted` round numbers between two. */
function ticks(low, high, wanted) {
  const span = high - low || 1;
  const power = 10 ** Math.floor(Math.log10(span / wanted));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => span / s <= wanted) || power * 10;
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step + 1e-9);
  const found = [];
  for (let i = 0; i <= Math.min(last - first, 2 * wanted); i++) found.push((first + i) * step);
  return found;
}

/** Return the exponential mean of points [x, y], without its bias at the beginning. */
function smoothed(points, share) {
  if (!share) return points;
  let mean = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    mean = share * mean + (1 - share) * y;
    weight = share * weight + (1 - share);
    return [x, mean / weight];
  });
}

/** Return at most `most` of the points, evenly, with the last one. */
function thinned(points, most) {
  if (points.length <= most) return points;
  const stride = Math.ceil(points.length / most);
  return points.filter((_, i) => i % stride === 0 || i === points.length - 1);
}

const BOX = { width: 380, height: 210, left: 52, right: 8, top: 8, bottom: 22 };

function pathOf(points, x, y) {
  return points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
}

/**
 * Return a chart of lines.
 * lines: [{name, colour, points: [[step, value], ...]}, ...]; smoothing: 0 to below 1.
 */
function lineChart(title, lines, smoothing) {
  const all = lines.flatMap((line) => line.points);
  const chart = make("figure", { class: "panel chart" });
  chart.style.margin = "0";
  chart.dataset.metric = title;
  chart.append(make("h2", {}, title));
  if (!all.length) return chart;

  let xLow = Infinity, xHigh = -Infinity, yLow = Infinity, yHigh = -Infinity;
  for (const [px, py] of all) {
    xLow = Math.min(xLow, px); xHigh = Math.max(xHigh, px);
    yLow = Math.min(yLow, py); yHigh = Math.max(yHigh, py);
  }
  // Values that differ by a rounding are one value: the axis has no numbers between them.
  const size = Math.max(Math.abs(yLow), Math.abs(yHigh));
  if (yHigh - yLow <= size * 1e-9) { yLow -= size * 0.1 || 1; yHigh += size * 0.1 || 1; }
  if (xLow === xHigh) { xLow -= 1; xHigh += 1; }
  const { width, height, left, right, top, bottom } = BOX;
  const x = (v) => left + ((v - xLow) / (xHigh - xLow)) * (width - left - right);
  const y = (v) => height - bottom - ((v - yLow) / (yHigh - yLow)) * (height - top - bottom);

  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const marks = ticks(yLow, yHigh, 5);
  const texts = apartNumbers(marks);
  marks.forEach((t, i) => {
    svg.append(makeSvg("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }));
    svg.append(makeSvg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, texts[i]));
  });
  for (const t of ticks(xLow, xHigh, 6).filter(Number.isInteger)) {
    svg.append(makeSvg("text", { x: x(t), y: height - 6, "text-anchor": "middle" }, String(t)));
  }
  for (const line of lines) {
    const raw = thinned(line.points, 1500);
    const shown = thinned(smoothed(line.points, smoothing), 1500);
    if (smoothing) svg.append(makeSvg("path", { class: "raw", d: pathOf(raw, x, y), stroke: line.colour }));
    svg.append(makeSvg("path", { class: "line", d: pathOf(shown, x, y), stroke: line.colour }));
    if (shown.length < 30) {
      for (const [px, py] of shown) svg.append(makeSvg("circle", { cx: x(px), cy: y(py), r: 2.4, fill: line.colour }));
    }
  }
  const cursor = makeSvg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  const reading = make("div", { class: "reading" });
  const read = (step) => {
    const texts = lines.filter((line) => line.points.length).map((line) => {
      let best = line.points[0];
      for (const point of line.points) if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
      return `${lines.length > 1 ? `${line.name} ` : ""}${shortNumber(best[1])} at ${best[0]}`;
    });
    reading.textContent = texts.join(" · ");
  };
  svg.addEventListener("mousemove", (event) => {
    const area = svg.getBoundingClientRect();
    const at = ((event.clientX - area.left) / area.width) * width;
    const step = xLow + ((at - left) / (width - left - right)) * (xHigh - xLow);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", at >= left ? "visible" : "hidden");
    read(step);
  });
  svg.addEventListener("mouseleave", () => { cursor.setAttribute("visibility", "hidden"); read(Infinity); });
  read(xHigh);
  chart.append(svg, reading);
  return chart;
}

/** Return a chart of bars, each a pile of parts. rows: [{step, parts: {name: value}}, ...]. */
function barChart(title, rows, colourOf) {
  const chart = make("figure", { class: "panel chart wide" }, make("h2", {}, title));
  chart.style.margin = "0";
  if (!rows.length) return chart;
  const { width, height, left, right, top, bottom } = { ...BOX, width: 760, height: 260 };
  const bins = binned(rows, 120);
  const total = (bin) => Object.values(bin.parts).reduce((a, b) => a + b, 0);
  const highest = Math.max(...bins.map(total), 1e-9);
  const y = (v) => height - bottom - (v / highest) * (height - top - bottom);
  const step = (width - left - right) / bins.length;
  const svg = makeSvg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const t of ticks(0, highest, 5)) {
    svg.append(makeSvg("line", { class: "grid", x1: left, x2: width - right, y1: y(t), y2: y(t) }));
    svg.append(makeSvg("text", { x: left - 6, y: y(t) + 4, "text-anchor": "end" }, shortNumber(t)));
  }
  bins.forEach((bin, i) => {
    let low = 0;
    for (const [name, value] of Object.entries(bin.parts)) {
      const bar = makeSvg("rect", {
        x: left + i * step + step * 0.08, width: step * 0.84,
        y: y(low + value), height: Math.max(0, y(low) - y(low + value)), fill: colourOf(name),
      }, makeSvg("title", {}, `step ${bin.step}: ${name} ${shortNumber(value)} s`));
      svg.append(bar);
      low += value;
    }
    if (i % Math.ceil(bins.length / 12) === 0) {
      svg.append(makeSvg("text", { x: left + (i + 0.5) * step, y: height - 6, "text-anchor": "middle" }, String(bin.step)));
    }
  });
  chart.append(svg);
  return chart;
}

/** Return means of neighbouring rows, at most `most` of them. */
function binned(rows, most) {
  const size = Math.ceil(rows.length / most);
  const bins = [];
  for (let i = 0; i < rows.length; i += size) {
    const part = rows.slice(i, i + size);
    const sums = {};
    for (const row of part) for (const [name, value] of Object.entries(row.parts)) sums[name] = (sums[name] || 0) + value / part.length;
    bins.push({ step: part[0].step, parts: sums });
  }
  return bins;
}
