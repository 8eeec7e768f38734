"use strict";
/* The page: tabs, runs, and what each tab shows. Data come from the server of this page, or are embedded in an exported one. */

const EVERY_MS = 2000;
const FIRST_METRICS = ["eval/accuracy", "eval/reward", "rl/reward", "rl/answer_tokens", "rl/entropy", "rl/mismatch", "rl/time/step", "train/loss", "eval/loss"];
const TABS = ["curves", "time", "trajectories", "answers", "settings"];
const FLAGS = ["truncated", "failed", "equal"];
const SORTS = { step: "newest step", mismatch: "worst mismatch", entropy: "entropy", staleness: "staleness", num_tokens: "length", reward: "reward" };

async function ask(path, given = {}) {
  const response = await fetch(`api/${path}?${new URLSearchParams(given)}`);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error ? body.error.message : response.statusText);
  return body;
}

/* What a server answers. */
const server = {
  isLive: true,
  runs: () => ask("runs"),
  metrics: (run, place) => ask("metrics", { run, place }),
  answers: (run) => ask("answers", { run }),
  settings: (run) => ask("settings", { run }),
  groups: (run, query) => ask("groups", { run, ...query }),
  group: (run, step, group) => ask("group", { run, step, group }),
};

/* The same of an exported page. */
function embedded(data) {
  const of = (run) => data.runs[run];
  const keep = (query) => (g) => (query.flags || "").split(",").filter(Boolean).every((flag) => g[flag]) &&
    !(query.unequal === "1" && g.equal) && g.step >= Number(query.first || 0) && g.step <= Number(query.last || Infinity);
  return {
    isLive: false,
    runs: async () => data.runs.map((run) => run.about),
    metrics: async (run) => ({ rows: of(run).metrics, place: "end", is_new: false, is_end: true }),
    answers: async (run) => of(run).answers,
    settings: async (run) => of(run).settings,
    groups: async (run, query) => {
      const sign = query.ascending === "1" ? 1 : -1;
      const value = (g) => (g[query.sort] === null ? Infinity : sign * g[query.sort]);
      const kept = of(run).groups.filter(keep(query)).sort((a, b) => value(a) - value(b));
      const start = query.page * query.size;
      return { groups: kept.slice(start, start + query.size), total: kept.length, page: query.page };
    },
    group: async (run, step, group) => of(run).groups.find((g) => g.step === step && g.group === group).whole,
  };
}

const inPage = document.getElementById("data");
const source = inPage ? embedded(JSON.parse(inPage.textContent)) : server;

const state = {
  tab: TABS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "curves",
  runs: [],
  rows: [], // By run: {place, lines: {metric: [[step, value], ...]}, times: [{step, parts}]}
  hidden: new Set(), // Numbers of runs that the curves leave out.
  chosen: null, // Names of metrics; null: the first ones that there are.
  search: "",
  smoothing: 0,
  run: 0, // Of the tabs that show one.
  query: { flags: "", unequal: "0", first: "", last: "", sort: "step", ascending: "0", page: 0, size: 20 },
  listed: null,
  open: null, // {step, group, data}
  kind: "advantage",
};
const main = document.getElementById("main");

// ------------------------------------------------------------------------------------------ data

/** Read what is new. Returns whether anything is. */
async function refresh() {
  const before = JSON.stringify(state.runs);
  state.runs = await source.runs();
  let changed = JSON.stringify(state.runs) !== before;
  for (let run = 0; run < state.runs.length; run++) {
    const known = (state.rows[run] ||= { place: "", lines: {}, times: [] });
    for (let isEnd = known.place === "end"; !isEnd;) {
      const part = await source.metrics(run, known.place);
      if (part.is_new) Object.assign(known, { lines: {}, times: [] });
      known.place = part.place;
      part.rows.forEach((row) => addRow(known, row));
      changed ||= part.rows.length > 0 || part.is_new;
      isEnd = part.is_end;
    }
  }
  return changed;
}

function addRow(known, row) {
  const parts = {};
  for (const [name, value] of Object.entries(row)) {
    if (name === "phase" || name === "step" || typeof value !== "number") continue;
    (known.lines[`${row.phase}/${name}`] ||= []).push([row.step, value]);
    if (name.startsWith("time/") && !/^time\/(step|idle_.*|.*_background)$/.test(name)) parts[name.slice(5)] = value;
  }
  if (Object.keys(parts).length) known.times.push({ step: row.step, parts });
}

function metricNames() {
  const names = new Set(state.rows.flatMap((known) => Object.keys(known.lines)));
  return [...names].sort();
}

// ------------------------------------------------------------------------------------------ frame

function drawFrame() {
  document.getElementById("tabs").replaceChildren(...TABS.map((tab) => {
    const button = make("button", { role: "tab", "aria-selected": String(tab === state.tab) }, tab);
    button.addEventListener("click", () => { state.tab = tab; location.hash = tab; drawAll(); });
    return button;
  }));
  document.getElementById("runs").replaceChildren(...state.runs.map((run, number) => {
    const dot = make("span", { class: "dot" });
    dot.style.background = COLOURS[number % COLOURS.length];
    const { step } = run.summary;
    const box = make("div", { class: "run", title: run.folder }, dot, make("strong", {}, run.name), make("span", { class: `badge ${run.state}` }, run.state));
    if (step !== undefined) box.append(make("span", { class: "soft" }, `evaluated at step ${step}`));
    if (run.num_trajectories) box.append(make("span", { class: "soft" }, `${run.num_trajectories.toLocaleString("en")} trajectories`));
    if (run.reason) box.append(make("span", { class: run.state === "stopped" ? "soft" : "reason" }, run.reason));
    return box;
  }));
}

function drawAll() {
  drawFrame();
  main.replaceChildren(make("p", { class: "soft" }, "reading …"));
  const draw = { curves: drawCurves, time: drawTime, trajectories: drawTrajectories, answers: drawAnswers, settings: drawSettings }[state.tab];
  draw().catch(showError);
}

function showError(error) {
  document.getElementById("connection").textContent = error.message;
}

/** Return a choice of the run, if there are several. */
function runChoice() {
  if (state.runs.length < 2) return null;
  const select = make("select", { id: "run" }, ...state.runs.map((run, i) => make("option", { value: i, selected: i === state.run }, run.name)));
  select.addEventListener("change", () => { state.run = Number(select.value); state.open = null; state.query.page = 0; drawAll(); });
  return make("label", {}, "run", select);
}

function option(label, id, isOn, change) {
  const box = make("input", { type: "checkbox", checked: isOn, id });
  box.addEventListener("change", () => change(box.checked));
  return make("label", {}, box, label);
}

// ------------------------------------------------------------------------------------------ curves

async function drawCurves() {
  const names = metricNames();
  if (!state.chosen) {
    const first = FIRST_METRICS.filter((name) => names.includes(name));
    if (first.length || names.length) state.chosen = new Set(first.length ? first : names.slice(0, 6));
  }
  const charts = make("div", { class: "charts" });
  const list = make("div", { class: "names" });
  const search = make("input", { type: "search", placeholder: "find a metric", value: state.search, id: "search" });
  search.addEventListener("input", () => { state.search = search.value; drawNames(list, charts); });
  const smoothing = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, id: "smoothing" });
  smoothing.addEventListener("input", () => { state.smoothing = Number(smoothing.value); drawCharts(charts); });
  const bar = make("div", { class: "bar" }, make("label", {}, "smooth", smoothing));
  if (state.runs.length > 1) {
    state.runs.forEach((run, i) => bar.append(option(run.name, `show-${i}`, !state.hidden.has(i), (isOn) => {
      if (isOn) state.hidden.delete(i); else state.hidden.add(i);
      drawCharts(charts);
    })));
  }
  drawNames(list, charts);
  drawCharts(charts);
  main.replaceChildren(make("div", { class: "columns" }, make("aside", { class: "panel" }, search, list), make("div", {}, bar, charts)));
}

function drawNames(list, charts) {
  const wanted = state.search.toLowerCase();
  list.replaceChildren(...metricNames().filter((name) => name.toLowerCase().includes(wanted)).map((name) =>
    option(name, `metric-${name}`, state.chosen.has(name), (isOn) => {
      if (isOn) state.chosen.add(name); else state.chosen.delete(name);
      drawCharts(charts);
    })));
}

function drawCharts(charts) {
  charts.replaceChildren(...[...(state.chosen || [])].map((name) => {
    const lines = state.runs.map((run, i) => ({ name: run.name, colour: COLOURS[i % COLOURS.length], points: state.rows[i].lines[name] || [] }));
    return lineChart(name, lines.filter((_, i) => !state.hidden.has(i)), state.smoothing);
  }));
}

// ------------------------------------------------------------------------------------------ time

async function drawTime() {
  const { times } = state.rows[state.run];
  const totals = {};
  for (const row of times) for (const [name, value] of Object.entries(row.parts)) totals[name] = (totals[name] || 0) + value;
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  const colour = (name) => COLOURS[names.indexOf(name) % COLOURS.length];
  const all = names.reduce((sum, name) => sum + totals[name], 0) || 1;
  const rows = names.map((name) => {
    const key = make("span", { class: "key" });
    key.style.background = colour(name);
    return make("tr", {}, make("td", {}, key, name), make("td", { class: "number" }, shortNumber(totals[name])),
      make("td", { class: "number" }, shortNumber(totals[name] / times.length)), make("td", { class: "number" }, `${((100 * totals[name]) / all).toFixed(1)} %`));
  });
  const heads = ["phase", "seconds", "a step", "share"].map((head, i) => make("th", { class: i ? "number" : "" }, head));
  main.replaceChildren(make("div", { class: "bar" }, runChoice()),
    barChart("seconds of each step by phase (of the rank that took longest)", times, colour),
    make("p", {}), make("table", { class: "panel" }, make("tr", {}, ...heads), ...rows));
}

// ------------------------------------------------------------------------------------------ trajectories

async function drawTrajectories() {
  if (!state.runs[state.run].num_trajectories) {
    main.replaceChildren(make("div", { class: "bar" }, runChoice()), make("p", {}, "This run has no trajectories: start it with --rollout.dump."));
    return;
  }
  const listed = await source.groups(state.run, state.query);
  state.listed = listed;
  if (!state.open && listed.groups.length) await openGroup(listed.groups[0]);
  const list = make("div", { class: "group-list" });
  const detail = make("div", { id: "detail" });
  drawList(list, detail);
  drawDetail(detail);
  main.replaceChildren(filterBar(), make("div", { class: "columns" }, make("aside", {}, pager(), list), detail));
}

/** Bring the list up to date, and leave what is being read as it is. */
async function updateTrajectories() {
  const list = document.querySelector(".group-list");
  if (!list || !state.open) return drawTrajectories();
  state.listed = await source.groups(state.run, state.query);
  drawList(list, document.getElementById("detail"));
  document.getElementById("pager").replaceWith(pager());
}

function changeQuery(change) {
  Object.assign(state.query, { page: 0 }, change);
  state.open = null;
  drawTrajectories().catch(showError);
}

function filterBar() {
  const flags = new Set(state.query.flags.split(",").filter(Boolean));
  const choices = FLAGS.map((flag) => option(flag, `flag-${flag}`, flags.has(flag), (isOn) => {
    if (isOn) flags.add(flag); else flags.delete(flag);
    changeQuery({ flags: [...flags].join(",") });
  }));
  const unequal = option("not equal", "unequal", state.query.unequal === "1", (isOn) => changeQuery({ unequal: isOn ? "1" : "0" }));
  const sort = make("select", { id: "sort" }, ...Object.entries(SORTS).map(([value, label]) => make("option", { value, selected: value === state.query.sort }, label)));
  sort.addEventListener("change", () => changeQuery({ sort: sort.value }));
  const ascending = option("least first", "ascending", state.query.ascending === "1", (isOn) => changeQuery({ ascending: isOn ? "1" : "0" }));
  const [first, last] = ["first", "last"].map((name) => {
    const input = make("input", { type: "number", min: 0, id: name, value: state.query[name], placeholder: name });
    input.addEventListener("change", () => changeQuery({ [name]: input.value }));
    return input;
  });
  const kind = make("select", { id: "kind" }, ...Object.entries(KINDS).map(([value, { title }]) => make("option", { value, selected: value === state.kind }, title)));
  kind.addEventListener("change", () => { state.kind = kind.value; drawDetail(document.getElementById("detail")); });
  return make("div", { class: "bar" }, runChoice(), make("label", {}, "colour", kind), make("label", {}, "sort by", sort), ascending,
    ...choices, unequal, make("label", {}, "steps", first, last));
}

function pager() {
  const { page, size } = state.query;
  const { total } = state.listed;
  const numPages = Math.max(1, Math.ceil(total / size));
  const turn = (label, to, isOn) => {
    const button = make("button", { disabled: !isOn }, label);
    button.addEventListener("click", () => changeQuery({ page: to }));
    return button;
  };
  return make("div", { class: "bar", id: "pager" }, turn("‹", page - 1, page > 0), make("span", {}, `${page + 1} of ${numPages} · ${total.toLocaleString("en")} groups`), turn("›", page + 1, page + 1 < numPages));
}

function drawList(list, detail) {
  list.replaceChildren(...state.listed.groups.map((g) => {
    const isOpen = Boolean(state.open) && state.open.step === g.step && state.open.group === g.group;
    const item = make("button", { class: "group-item", "aria-current": String(isOpen) }, `step ${g.step} · group ${g.group} · reward ${shortNumber(g.reward)}`);
    for (const flag of FLAGS) if (g[flag]) item.append(make("span", { class: `flag ${flag}` }, flag));
    const facts = `${g.prompt}`.replace(/\s+/g, " ");
    item.append(make("span", { class: "prompt" }, facts), make("span", { class: "prompt" }, `mismatch ${shortNumber(g.mismatch)} · entropy ${shortNumber(g.entropy)} · rewards ${g.rewards.map((reward) => shortNumber(reward)).join(" ")}`));
    item.addEventListener("click", async () => { await openGroup(g).catch(showError); drawList(list, detail); drawDetail(detail); });
    return item;
  }));
}

async function openGroup(g) {
  state.open = { step: g.step, group: g.group, data: await source.group(state.run, g.step, g.group) };
}

function drawDetail(detail) {
  detail.replaceChildren(state.open ? groupView(state.open.data, state.kind) : make("p", { class: "soft" }, "No group is like that."));
}

// ------------------------------------------------------------------------------------------ answers, settings

async function drawAnswers() {
  const evaluations = await source.answers(state.run);
  const blocks = evaluations.reverse().map((evaluation) => {
    const title = `step ${evaluation.step}${evaluation.name ? ` (${evaluation.name.replace("_", " ")})` : ""}`;
    const answers = evaluation.answers.map((a) => {
      const prompt = typeof a.prompt === "string" ? a.prompt : a.prompt.map((m) => `${m.role}: ${typeof m.content === "string" ? m.content : JSON.stringify(m.content)}`).join("\n");
      return make("div", { class: "answer" }, make("strong", {}, `reward ${shortNumber(a.reward)}`), make("pre", { class: "soft" }, prompt), make("pre", {}, a.answer));
    });
    return make("section", { class: "panel" }, make("h2", {}, title), ...answers);
  });
  main.replaceChildren(make("div", { class: "bar" }, runChoice()), ...(blocks.length ? blocks : [make("p", {}, "No answers yet.")]));
}

async function drawSettings() {
  main.replaceChildren(make("div", { class: "bar" }, runChoice()), make("pre", { class: "panel" }, await source.settings(state.run)));
}

// ------------------------------------------------------------------------------------------ life

async function update() {
  try {
    const changed = await refresh();
    document.getElementById("connection").textContent = "";
    if (!changed) return;
    drawFrame();
    if (state.tab === "curves") { const charts = document.querySelector(".charts"); if (charts && state.chosen) drawCharts(charts); else await drawCurves(); }
    if (state.tab === "time") await drawTime();
    if (state.tab === "trajectories") await updateTrajectories();
  } catch (error) {
    document.getElementById("connection").textContent = `no answer (${error.message}); trying again`;
  }
}

async function start() {
  try { await refresh(); } catch (error) { showError(error); return; }
  drawAll();
  if (!source.isLive) return;
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    await update();
  }
}

start();
