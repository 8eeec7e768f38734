"use strict";
/* Charts by uPlot: lines over steps, piles of parts, and histograms. All text goes in as text, never as markup. */

const COLOURS = ["#3b7ddd", "#e8590c", "#2f9e44", "#ae3ec9", "#e64980", "#1098ad", "#b08900", "#868e96"];
const WHOLE_STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((power) => [power, 2 * power, 5 * power]);

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

/** Return a number as people read it: few digits. */
function shortNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** Return ascending numbers with as few digits as tell them apart; a null, which has no mark, as "". */
function apartNumbers(values) {
  let texts = [];
  for (let digits = 4; digits <= 12; digits++) {
    texts = values.map((value) => (value === null ? "" : shortNumber(value, digits)));
    const marked = texts.filter(Boolean);
    if (new Set(marked).size === marked.length) break;
  }
  return texts;
}

/** Return the exponential mean of points [x, y], without its bias at the beginning. */
function smoothed(points, share) {
  let mean = 0;
  let weight = 0;
  return points.map(([x, y]) => {
    mean = share * mean + (1 - share) * y;
    weight = share * weight + (1 - share);
    return [x, mean / weight];
  });
}

/** Return the range of an axis around values; those that differ by a rounding are one value. */
function padded(low, high) {
  if (low === null) return [0, 1];
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (size === 0) return [0, 1];
  const pad = high - low <= size * 1e-9 ? size * 0.1 : (high - low) * 0.05;
  return [low - pad, high + pad];
}

/**
 * Return a figure that draws a plot once it is on the page, in its width, and frees it when it is not any more.
 * read: returns what stands below, given the place of the cursor in the data, or null. options: of uPlot.
 */
function figureOf(title, height, data, read, options) {
  const box = make("div", { class: "plot" });
  const reading = make("div", { class: "reading" }, read(null));
  const figure = make("figure", { class: "panel chart" }, make("h2", {}, title), box, reading);
  const font = "11px system-ui, sans-serif";
  const axis = {
    stroke: () => getComputedStyle(box).color, font, labelFont: font, labelSize: 16, labelGap: 0,
    grid: { stroke: () => getComputedStyle(box).borderTopColor, width: 1 }, ticks: { show: false },
    values: (plot, marks) => apartNumbers(marks),
  };
  const [x, y] = options.axes;
  const whole = {
    ...options,
    legend: { show: false },
    padding: [10, 10, 0, 0],
    axes: [{ ...axis, size: 24, ...x, grid: { show: false } }, { ...axis, size: 56, ...y }],
    hooks: { ...options.hooks, setCursor: [(plot) => { reading.textContent = read(plot.cursor.idx); }] },
  };
  new ResizeObserver(() => {
    const width = box.clientWidth;
    if (width && figure.plot) figure.plot.setSize({ width, height });
    else if (width) figure.plot = new uPlot({ ...whole, width, height }, data, box);
    else if (figure.plot) { figure.plot.destroy(); figure.plot = null; }
  }).observe(box);
  return figure;
}

/**
 * Return a chart of lines over steps.
 * lines: [{name, colour, points: [[step, value], ...]}, ...]; smoothing: 0 to below 1; zoom: [first, last] step, or
 * null; onZoom: is called with another one.
 */
function lineChart(title, lines, { smoothing, isLog, zoom, onZoom }) {
  const shown = lines.filter((line) => line.points.length);
  const tables = [];
  const series = [{}];
  for (const { points, colour } of shown) {
    const table = (list) => [list.map(([step]) => step), list.map(([, v]) => (isLog && v <= 0 ? null : v))];
    const line = { stroke: colour, width: 1.7, spanGaps: true, points: { size: 5, fill: colour } };
    if (smoothing) {
      tables.push(table(points));
      series.push({ ...line, stroke: `${colour}50`, width: 1, points: { show: false } });
    }
    tables.push(table(smoothing ? smoothed(points, smoothing) : points));
    series.push(line);
  }
  const data = tables.length ? uPlot.join(tables) : [[]];
  const steps = data[0];
  const around = steps.length > 1 ? [steps[0], steps.at(-1)] : [(steps[0] || 0) - 1, (steps[0] || 0) + 1];
  const read = (place) => {
    const step = place === null || place === undefined ? Infinity : steps[place];
    return shown.map(({ name, points }) => {
      let best = points.at(-1);
      for (const point of points) if (Math.abs(point[0] - step) < Math.abs(best[0] - step)) best = point;
      return `${lines.length > 1 ? `${name} ` : ""}${shortNumber(best[1])} at ${best[0]}`;
    }).join(" · ");
  };
  const figure = figureOf(title, 220, data, read, {
    series,
    scales: {
      x: { time: false, range: () => zoom || around },
      y: isLog ? { distr: 3 } : { range: (plot, low, high) => padded(low, high) },
    },
    axes: [{ label: "step", incrs: WHOLE_STEPS }, {}],
    cursor: {
      y: false,
      drag: { setScale: false },
      sync: { key: "steps", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      bind: { dblclick: () => () => onZoom(null) },
    },
    hooks: {
      setSelect: [({ select, posToVal }) => {
        if (select.width) onZoom([posToVal(select.left, "x"), posToVal(select.left + select.width, "x")]);
      }],
    },
  });
  figure.dataset.metric = title;
  return figure;
}

/** Return a chart of bars, each a pile of parts. rows: [{step, parts: {name: value}}, ...]; names: from below. */
function pileChart(title, rows, names, colourOf) {
  const bins = binned(rows, 120);
  const tops = names.map((_, n) => bins.map(({ parts }) => names.slice(0, n + 1).reduce((sum, name) => sum + (parts[name] || 0), 0)));
  const bars = uPlot.paths.bars({ size: [0.84, 60] });
  const read = (place) => {
    const { step, last, parts } = bins[place ?? bins.length - 1];
    const title = step === last ? `step ${step}` : `steps ${step} to ${last}, means`;
    return `${title}: ${names.filter((name) => parts[name]).map((name) => `${name} ${shortNumber(parts[name])}`).join(" · ")}`;
  };
  // The highest ones first: each covers the lower part of the one before.
  const series = names.map((name) => ({ paths: bars, fill: colourOf(name), points: { show: false } })).reverse();
  const margin = bins.length > 1 ? (bins[1].step - bins[0].step) * 0.6 : 1;
  const around = [bins[0].step - margin, bins.at(-1).step + margin];
  return figureOf(title, 280, [bins.map(({ step }) => step), ...tops.reverse()], read, {
    series: [{}, ...series],
    scales: { x: { time: false, range: () => around }, y: { range: (plot, low, high) => [0, high * 1.05 || 1] } },
    axes: [{ label: "step", incrs: WHOLE_STEPS }, { label: "seconds" }],
    cursor: { y: false, drag: { x: false }, points: { show: false } },
  });
}

/** Return means of neighbouring rows, at most `most` of them. */
function binned(rows, most) {
  const size = Math.ceil(rows.length / most);
  const bins = [];
  for (let i = 0; i < rows.length; i += size) {
    const part = rows.slice(i, i + size);
    const parts = {};
    for (const row of part) {
      for (const [name, value] of Object.entries(row.parts)) parts[name] = (parts[name] || 0) + value / part.length;
    }
    bins.push({ step: part[0].step, last: part.at(-1).step, parts });
  }
  return bins;
}

/** Return a chart of how many episodes have a value. edges: one more than counts. */
function histogram(title, { edges, counts }) {
  const middles = counts.map((_, i) => (edges[i] + edges[i + 1]) / 2);
  const all = counts.reduce((sum, count) => sum + count, 0);
  const read = (place) => place === null || place === undefined
    ? `${all.toLocaleString("en")} episodes`
    : `${counts[place].toLocaleString("en")} of ${shortNumber(edges[place])} to ${shortNumber(edges[place + 1])}`;
  const fill = COLOURS[0];
  return figureOf(title, 90, [middles, counts], read, {
    series: [{}, { paths: uPlot.paths.bars({ size: [0.9, Infinity] }), fill, points: { show: false } }],
    scales: { x: { time: false, range: () => [edges[0], edges.at(-1)] }, y: { range: (plot, low, high) => [0, high * 1.1] } },
    axes: [{}, { incrs: WHOLE_STEPS, space: 24 }],
    cursor: { y: false, drag: { x: false }, points: { show: false } },
  });
}
