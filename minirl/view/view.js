"use strict";
/* The page: tabs, runs, and what each tab shows. Data come from the server of this page, or are embedded in an exported one. */

const EVERY_MS = 2000;
const FIRST_METRICS = ["eval/accuracy", "eval/reward", "rl/reward", "rl/answer_tokens", "rl/entropy", "rl/mismatch", "rl/time/step", "train/loss", "eval/loss"];
const TABS = { curves: drawCurves, time: drawTime, trajectories: drawTrajectories, answers: drawAnswers, settings: drawSettings };
const FLAGS = {
  cut_off: { title: "cut off", hint: "the last answer, or its episode, was cut at a limit" },
  failed: { title: "failed", hint: "the environment or the agent failed" },
  equal: { title: "equal", hint: "all answers of the group have one reward" },
};
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
  const texts = (t) => [t.prompt, t.completion, t.error, ...Object.values(t.row)].join("\n").toLowerCase();
  const keep = (query) => (g) => (query.flags || "").split(",").filter(Boolean).every((flag) => g[flag]) &&
    !(query.unequal === "1" && g.equal) && g.step >= Number(query.first || 0) && g.step <= Number(query.last || Infinity) &&
    (!query.search || g.whole.trajectories.some((t) => texts(t).includes(query.search.toLowerCase())));
  return {
    isLive: false,
    runs: async () => data.runs.map((run) => run.about),
    metrics: async (run) => ({ rows: of(run).metrics, place: "end", is_new: false }),
    answers: async (run) => of(run).answers,
    settings: async (run) => of(run).settings,
    groups: async (run, query) => {
      const sign = query.ascending === "1" ? 1 : -1;
      const value = (g) => (g[query.sort] === null ? Infinity : sign * g[query.sort]);
      const kept = of(run).groups.filter(keep(query)).sort((a, b) => value(a) - value(b));
      const start = query.page * query.size;
      return { groups: kept.slice(start, start + query.size), total: kept.length, page: query.page, histograms: of(run).histograms };
    },
    group: async (run, step, group) => {
      const found = of(run).groups.find((g) => g.step === step && g.group === group);
      if (!found) throw new Error(`this file was exported without group ${group} of step ${step}`);
      return found.whole;
    },
    num_groups: (run) => of(run).groups.length,
  };
}

const inPage = document.getElementById("data");
const source = inPage ? embedded(JSON.parse(inPage.textContent)) : server;

const state = {
  // The tab, the run of those that show one, and the group and episode to show are in the address: see readAddress.
  tab: "curves",
  run: 0,
  place: null, // {step, group, episode, segment}; null: the first group of the list.
  runs: [],
  rows: [], // By run: {place, lines: {metric: [[step, value], ...]}, times: [{step, parts}]}
  hidden: new Set(), // Numbers of runs that the curves leave out.
  chosen: null, // Names of metrics; null: the first ones that there are.
  numNames: 0, // Of the metrics in the list.
  search: "",
  smoothing: 0,
  isLog: false,
  zoom: null, // [first, last] step of the curves; null: all.
  query: { flags: "", unequal: "0", first: "", last: "", sort: "step", ascending: "0", page: 0, size: 20, search: "" },
  listed: null,
  open: null, // The group that is shown, with its trajectories.
  missing: "", // Why there is none.
  kind: "advantage",
  hasHistograms: true,
  evaluated: null, // Step of the newest evaluation of the run.
};
const main = document.getElementById("main");

// ------------------------------------------------------------------------------------------ address

/** Return the address of a tab, a run and a place in it: #trajectories?run=0&step=3&group=7&episode=2&segment=0 */
function addressOf(tab, run = state.run, place = null) {
  return `#${tab}?${new URLSearchParams({ run, ...place })}`;
}

/** Take the tab, the run and the place from the address. */
function readAddress() {
  const [tab, text] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(text);
  const number = (name) => (given.has(name) ? Number(given.get(name)) : 0);
  state.tab = tab in TABS ? tab : "curves";
  state.run = state.runs[number("run")] ? number("run") : 0;
  const names = ["step", "group", ...(given.has("episode") ? ["episode", "segment"] : [])];
  state.place = given.has("group") ? Object.fromEntries(names.map((name) => [name, number(name)])) : null;
}

/** Show what the address names, as links, tabs and the Back button change it. */
async function follow() {
  const { tab, run } = state;
  readAddress();
  if (!document.querySelector(".group-list") || state.tab !== tab || state.run !== run || tab !== "trajectories" || !state.place) return draw();
  await openPlace();
  showPlace();
}

// ------------------------------------------------------------------------------------------ data

/** Read what is new. Returns whether anything is. */
async function refresh() {
  const before = JSON.stringify(state.runs);
  state.runs = await source.runs();
  let changed = JSON.stringify(state.runs) !== before;
  for (let run = 0; run < state.runs.length; run++) {
    const known = (state.rows[run] ||= { place: "", lines: {}, times: [] });
    if (known.place === "end") continue;
    const part = await source.metrics(run, known.place);
    if (part.is_new) Object.assign(known, { lines: {}, times: [] });
    known.place = part.place;
    part.rows.forEach((row) => addRow(known, row));
    changed ||= part.rows.length > 0 || part.is_new;
  }
  return changed;
}

function addRow(known, row) {
  const parts = {};
  for (const [name, value] of Object.entries(row)) {
    if (name === "phase" || name === "step" || typeof value !== "number") continue;
    (known.lines[`${row.phase}/${name}`] ||= []).push([row.step, value]);
    if (name.startsWith("time/") && !/^time\/(step|idle_(min|median|max_rank))$/.test(name)) parts[name.slice(5)] = value;
  }
  if (Object.keys(parts).length) known.times.push({ step: row.step, parts });
}

// ------------------------------------------------------------------------------------------ frame

function drawFrame() {
  document.getElementById("tabs").replaceChildren(...Object.keys(TABS).map((tab) =>
    make("a", { role: "tab", href: addressOf(tab), "aria-selected": String(tab === state.tab) }, tab)));
  document.getElementById("runs").replaceChildren(...state.runs.map((run, number) => {
    const dot = make("span", { class: "dot" });
    dot.style.background = COLOURS[number % COLOURS.length];
    const { held_out_step: step } = run.summary;
    const box = make("div", { class: "run", title: run.folder }, dot, make("strong", {}, run.name), make("span", { class: `badge ${run.state}` }, run.state));
    if (step != null) box.append(make("span", { class: "soft" }, `evaluated at step ${step}`));
    if (run.num_trajectories) box.append(make("span", { class: "soft" }, `${run.num_trajectories.toLocaleString("en")} trajectories`));
    if (run.reason) box.append(make("span", { class: run.state === "stopped" ? "soft" : "reason" }, run.reason));
    return box;
  }));
}

let numDrawn = 0;

/** Draw the tab, unless another one is drawn meanwhile. */
function draw() {
  const number = ++numDrawn;
  drawFrame();
  if (main.dataset.tab !== state.tab) main.replaceChildren(make("p", { class: "soft" }, "reading …"));
  main.dataset.tab = state.tab;
  return showProblem(async () => {
    const parts = await TABS[state.tab]();
    if (number === numDrawn) main.replaceChildren(...parts.filter(Boolean));
    if (state.tab === "trajectories") showPlace();
  });
}

/** Do something with the tab. What goes wrong stays on the page until something goes right. */
async function showProblem(act) {
  const problem = document.getElementById("problem");
  try {
    await act();
    problem.textContent = "";
  } catch (error) {
    main.replaceChildren();
    problem.textContent = `The tab ${state.tab} cannot be shown: ${error.message}`;
  }
}

/** Return a choice of the run, if there are several. */
function runChoice() {
  if (state.runs.length < 2) return null;
  const select = make("select", { id: "run" }, ...state.runs.map((run, i) => make("option", { value: i, selected: i === state.run }, run.name)));
  select.addEventListener("change", () => { state.query.page = 0; location.hash = addressOf(state.tab, select.value); });
  return make("label", {}, "run", select);
}

function option(label, id, isOn, change) {
  const box = make("input", { type: "checkbox", checked: isOn, id });
  box.addEventListener("change", () => change(box.checked));
  return make("label", {}, box, label);
}

// ------------------------------------------------------------------------------------------ curves

function metricNames() {
  return [...new Set(state.rows.flatMap((known) => Object.keys(known.lines)))].sort();
}

/** Return the names of the metrics that are shown: the first ones that there are, until others are chosen. */
function chosenNames() {
  const names = metricNames();
  const first = FIRST_METRICS.filter((name) => names.includes(name));
  return state.chosen || new Set(first.length ? first : names.slice(0, 6));
}

/** Return the group of a metric in the list: rl/time of rl/time/step. */
function groupOf(name) {
  return name.split("/").slice(0, name.split("/").length > 2 ? 2 : 1).join("/");
}

async function drawCurves() {
  const charts = make("div", { class: "charts" });
  const list = make("div", { class: "names" });
  const search = make("input", { type: "search", placeholder: "find a metric", value: state.search, id: "search" });
  search.addEventListener("input", () => { state.search = search.value; drawNames(list, charts); });
  const smoothing = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smoothing, id: "smoothing" });
  smoothing.addEventListener("input", () => { state.smoothing = Number(smoothing.value); drawCharts(charts); });
  const isLog = option("log axis", "log", state.isLog, (isOn) => { state.isLog = isOn; drawCharts(charts); });
  const all = make("button", { id: "all-steps" }, "all steps");
  all.addEventListener("click", () => { state.zoom = null; drawCharts(charts); });
  const bar = make("div", { class: "bar" }, make("label", {}, "smooth", smoothing), isLog, all, make("span", { class: "soft" }, "drag over steps to zoom"));
  if (state.runs.length > 1) {
    state.runs.forEach((run, i) => bar.append(option(run.name, `show-${i}`, !state.hidden.has(i), (isOn) => {
      if (isOn) state.hidden.delete(i); else state.hidden.add(i);
      drawCharts(charts);
    })));
  }
  drawNames(list, charts);
  drawCharts(charts);
  return [make("div", { class: "columns" }, make("aside", { class: "panel" }, search, list), make("div", {}, bar, charts))];
}

function drawNames(list, charts) {
  state.numNames = metricNames().length;
  const wanted = state.search.toLowerCase();
  const groups = {};
  const chosen = chosenNames();
  for (const name of metricNames()) if (name.toLowerCase().includes(wanted)) (groups[groupOf(name)] ||= []).push(name);
  list.replaceChildren(...Object.entries(groups).map(([group, names]) => {
    const choose = (those, isOn) => {
      state.chosen = chosenNames();
      for (const name of those) if (isOn) state.chosen.add(name); else state.chosen.delete(name);
      drawCharts(charts);
    };
    const all = option("all", `group-${group}`, names.every((name) => chosen.has(name)), (isOn) => { choose(names, isOn); drawNames(list, charts); });
    const isOpen = Boolean(wanted) || names.some((name) => chosen.has(name));
    return make("details", { open: isOpen }, make("summary", {}, `${group} (${names.length})`), all,
      ...names.map((name) => option(name.slice(group.length + 1), `metric-${name}`, chosen.has(name), (isOn) => choose([name], isOn))));
  }));
}

function drawCharts(charts) {
  const onZoom = (zoom) => { state.zoom = zoom; drawCharts(charts); };
  charts.replaceChildren(...[...chosenNames()].map((name) => {
    const lines = state.runs.map((run, i) => ({ name: run.name, colour: COLOURS[i % COLOURS.length], points: state.rows[i].lines[name] || [] }));
    return lineChart(name, lines.filter((_, i) => !state.hidden.has(i)), { ...state, onZoom });
  }));
}

// ------------------------------------------------------------------------------------------ time

async function drawTime() {
  const { times } = state.rows[state.run];
  if (!times.length) return [make("div", { class: "bar" }, runChoice()), make("p", {}, "No step is done yet.")];
  const totals = {};
  for (const row of times) for (const [name, value] of Object.entries(row.parts)) totals[name] = (totals[name] || 0) + value;
  const names = Object.keys(totals).sort((a, b) => totals[b] - totals[a]);
  const alphabetical = Object.keys(totals).sort(); // So that a phase keeps its colour while the run goes on.
  const colour = (name) => `hsl(${alphabetical.indexOf(name) * 137.5 % 360} 60% ${45 + 15 * (alphabetical.indexOf(name) % 2)}%)`;
  const all = names.reduce((sum, name) => sum + totals[name], 0) || 1;
  const rows = names.map((name) => {
    const key = make("span", { class: "key" });
    key.style.background = colour(name);
    return make("tr", {}, make("td", {}, key, name), make("td", { class: "number" }, shortNumber(totals[name])),
      make("td", { class: "number" }, shortNumber(totals[name] / times.length)), make("td", { class: "number" }, `${((100 * totals[name]) / all).toFixed(1)} %`));
  });
  const heads = ["phase", "seconds", "a step", "share"].map((head, i) => make("th", { class: i ? "number" : "" }, head));
  const chart = pileChart("seconds of each step by phase (of the rank that took longest)", times, names, colour);
  return [make("div", { class: "bar" }, runChoice()), chart, make("p", {}), make("table", { class: "panel" }, make("tr", {}, ...heads), ...rows)];
}

// ------------------------------------------------------------------------------------------ trajectories

async function drawTrajectories() {
  const { num_trajectories, num_groups } = state.runs[state.run];
  if (!num_trajectories) {
    return [make("div", { class: "bar" }, runChoice()), make("p", {}, "This run has no trajectories: RL leaves them, if it is started with --rollout.dump.")];
  }
  state.listed = await source.groups(state.run, state.query);
  await openPlace();
  const leftOut = source.isLive ? 0 : num_groups - source.num_groups(state.run);
  const note = leftOut ? make("p", { class: "soft", id: "left-out" }, `This file has ${num_groups - leftOut} of ${num_groups} groups, evenly over the steps. `
    + "`python -m minirl.view RUN --export FILE --share 1` exports all groups.") : null;
  const aside = make("aside", {}, pager(), make("div", { class: "group-list" }));
  const detail = make("div", { id: "detail" });
  return [filterBar(), note, histograms(), make("div", { class: "columns" }, aside, detail)];
}

/** Draw list and group into their places on the page. */
function showPlace() {
  if (!state.listed || !document.querySelector(".group-list")) return;
  drawList();
  drawDetail();
}

/** Bring the list up to date, and leave what is being read as it is. */
async function updateTrajectories() {
  const shown = document.querySelector(".group-list");
  if (!shown || !state.open) return draw();
  return showProblem(async () => {
    state.listed = await source.groups(state.run, state.query);
    drawList();
    document.getElementById("pager").replaceWith(pager());
    document.getElementById("histograms").replaceWith(histograms());
  });
}

function changeQuery(change) {
  Object.assign(state.query, { page: 0 }, change);
  state.place = null;
  if (location.hash !== addressOf("trajectories")) history.replaceState(null, "", addressOf("trajectories"));
  draw();
}

function filterBar() {
  const flags = new Set(state.query.flags.split(",").filter(Boolean));
  const choices = Object.entries(FLAGS).map(([flag, { title }]) => option(title, `flag-${flag}`, flags.has(flag), (isOn) => {
    if (isOn) flags.add(flag); else flags.delete(flag);
    changeQuery({ flags: [...flags].join(",") });
  }));
  const unequal = option("not equal", "unequal", state.query.unequal === "1", (isOn) => changeQuery({ unequal: isOn ? "1" : "0" }));
  const sort = make("select", { id: "sort" }, ...Object.entries(SORTS).map(([value, label]) => make("option", { value, selected: value === state.query.sort }, label)));
  sort.addEventListener("change", () => changeQuery({ sort: sort.value }));
  const ascending = option("least first", "ascending", state.query.ascending === "1", (isOn) => changeQuery({ ascending: isOn ? "1" : "0" }));
  const [first, last] = ["first", "last"].map((name) => {
    const input = make("input", { type: "number", min: 0, id: name, value: state.query[name], placeholder: name });
    input.addEventListener("change", () => changeQuery({ [name]: Number.isNaN(input.valueAsNumber) ? "" : Math.trunc(input.valueAsNumber) }));
    return input;
  });
  const search = make("input", { type: "search", id: "text", value: state.query.search, placeholder: "in prompts and answers" });
  search.addEventListener("change", () => changeQuery({ search: search.value }));
  const kind = make("select", { id: "kind" }, ...Object.entries(KINDS).map(([value, { title }]) => make("option", { value, selected: value === state.kind }, title)));
  kind.addEventListener("change", () => { state.kind = kind.value; drawDetail(); });
  return make("div", { class: "bar" }, runChoice(), make("label", {}, "find", search), make("label", {}, "colour", kind), make("label", {}, "sort by", sort), ascending,
    ...choices, unequal, make("label", {}, "steps", first, last));
}

function histograms() {
  const charts = Object.entries(state.listed.histograms).map(([name, counted]) => histogram(name, counted));
  const box = make("details", { id: "histograms", open: state.hasHistograms }, make("summary", {}, `rewards and lengths${source.isLive ? "" : " of the whole run"}`), make("div", { class: "charts" }, ...charts));
  box.addEventListener("toggle", () => { state.hasHistograms = box.open; });
  return box;
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

function drawList() {
  document.querySelector(".group-list").replaceChildren(...state.listed.groups.map((g) => {
    const isOpen = Boolean(state.open) && state.open.step === g.step && state.open.group === g.group;
    const address = addressOf("trajectories", state.run, { step: g.step, group: g.group });
    const item = make("a", { class: "group-item", href: address, "aria-current": String(isOpen) }, `step ${g.step} · group ${g.group} · reward ${shortNumber(g.reward)}`);
    for (const [flag, { title, hint }] of Object.entries(FLAGS)) if (g[flag]) item.append(make("span", { class: `flag ${flag}`, title: hint }, title));
    const facts = `${g.prompt}`.replace(/\s+/g, " ");
    const rewards = g.rewards.map((reward) => shortNumber(reward)).join(" ");
    item.append(make("span", { class: "prompt" }, facts), make("span", { class: "prompt" }, `mismatch ${shortNumber(g.mismatch)} · entropy ${shortNumber(g.entropy)} · rewards ${rewards}`));
    return item;
  }));
}

/** Read the group that the address names, or else the first one of the list. */
async function openPlace() {
  const wanted = state.place || state.listed.groups[0];
  state.open = null;
  state.missing = "No group is like that.";
  try {
    if (wanted) state.open = await source.group(state.run, wanted.step, wanted.group);
  } catch (error) {
    state.missing = error.message;
  }
}

function drawDetail() {
  const linkTo = (place) => addressOf("trajectories", state.run, place);
  const view = state.open ? groupView(state.open, { kind: state.kind, place: state.place, linkTo, search: state.query.search })
    : make("p", { class: "reason" }, state.missing);
  document.getElementById("detail").replaceChildren(view);
  const marked = view.querySelector('.trajectory[aria-current="true"]');
  if (marked) marked.scrollIntoView({ block: "nearest", inline: "center" });
}

// ------------------------------------------------------------------------------------------ answers, settings

async function drawAnswers() {
  const evaluations = await source.answers(state.run);
  const blocks = [...evaluations].reverse().map((evaluation) => {
    const title = `step ${evaluation.step}${evaluation.name ? ` (${evaluation.name.replace("_", " ")})` : ""}`;
    const answers = evaluation.answers.map((a) => {
      const said = (m) => [m.content, ...(m.tool_calls || []).map((call) => JSON.stringify(call.function))].filter(Boolean).join(" ");
      const prompt = typeof a.prompt === "string" ? a.prompt : a.prompt.map((m) => `${m.role}: ${said(m)}`).join("\n");
      return make("div", { class: "answer" }, make("strong", {}, `reward ${shortNumber(a.reward)}`), make("pre", { class: "soft" }, prompt), make("pre", {}, a.answer));
    });
    return make("section", { class: "panel" }, make("h2", {}, title), ...answers);
  });
  return [make("div", { class: "bar" }, runChoice()), ...(blocks.length ? blocks : [make("p", {}, "No answers yet.")])];
}

/** The settings of all runs beside each other: first those in which they differ, then those that are not the default. */
async function drawSettings() {
  const all = await Promise.all(state.runs.map((_, run) => source.settings(run)));
  const names = new Set(all.flatMap(({ values }) => Object.keys(values)));
  names.delete("output"); // Where a run is.
  const text = (value) => {
    if (value === undefined) return "–";
    if (typeof value === "number" && Math.abs(value) < 1e-3 && value) return value.toExponential();
    return typeof value === "string" ? value : JSON.stringify(value);
  };
  const valuesOf = (name) => all.map(({ values }) => text(values[name]));
  const defaultOf = (name) => text(all.map(({ defaults }) => defaults[name]).find((value) => value !== undefined));
  const hasDefaults = all.some(({ defaults }) => Object.keys(defaults).length);
  const isOf = {
    "differ from run to run": (name) => new Set(valuesOf(name)).size > 1,
    "not the default": (name) => hasDefaults && valuesOf(name).some((value) => value !== defaultOf(name)),
    [hasDefaults ? "as by default" : "all others"]: () => true,
  };
  const blocks = Object.entries(isOf).map(([title, is]) => {
    const shown = [...names].filter(is);
    shown.forEach((name) => names.delete(name));
    const heads = ["setting", "default", ...state.runs.map((run) => run.name)].map((head) => make("th", {}, head));
    const rows = shown.map((name) => make("tr", {}, ...[name, defaultOf(name), ...valuesOf(name)].map((value, i) => make("td", { class: i === 1 ? "soft" : "" }, value))));
    return shown.length ? make("details", { class: "panel", open: title !== "as by default" }, make("summary", {}, `${title} (${shown.length})`),
      make("table", { class: "settings" }, make("tr", {}, ...heads), ...rows)) : null;
  });
  return blocks.some(Boolean) ? blocks : [make("p", {}, "No settings yet.")];
}

// ------------------------------------------------------------------------------------------ life

async function update() {
  const connection = document.getElementById("connection");
  try {
    const changed = await refresh();
    connection.textContent = "";
    if (!changed) return;
  } catch (error) {
    connection.textContent = `no answer (${error.message}); trying again`;
    return;
  }
  const evaluated = state.runs[state.run].summary.held_out_step;
  const isEvaluated = evaluated !== state.evaluated;
  state.evaluated = evaluated;
  drawFrame();
  const charts = document.querySelector(".columns .charts");
  const isNew = state.numNames !== metricNames().length;
  if (state.tab === "curves" && charts && !isNew) drawCharts(charts);
  else if (state.tab === "trajectories") await updateTrajectories();
  else if (state.tab === "answers" ? isEvaluated : state.tab !== "settings") await draw();
}

async function start() {
  while (!state.runs.length) {
    try {
      await refresh();
    } catch (error) {
      document.getElementById("connection").textContent = `no answer (${error.message}); trying again`;
      await new Promise((done) => setTimeout(done, EVERY_MS));
    }
  }
  readAddress();
  addEventListener("hashchange", follow);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const { plot } of document.querySelectorAll(".chart")) if (plot) plot.redraw(false);
  });
  await draw();
  while (source.isLive) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    await update();
  }
}

start();
