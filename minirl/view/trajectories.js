"use strict";
/* A group of trajectories side by side, each token with the colour of a number. Texts of a policy are set as text only. */

const KINDS = {
  advantage: { title: "advantage", diverging: true, hint: "red: made less likely, green: more likely" },
  logprob: { title: "trainer's log-prob", low: -6, high: 0, reversed: true, hint: "dark: unlikely" },
  mismatch: { title: "|trainer - engine| log-prob", low: 0, hint: "dark: the engine computed another probability" },
  entropy: { title: "entropy", low: 0, hint: "dark: the policy was undecided" },
  staleness: { title: "staleness, updates", low: 0, hint: "dark: sampled by older weights" },
};
const MOST_TOKENS = 4000; // Of a trajectory, before a button shows the rest.
const LONG_CONTEXT = 500; // Characters of a prompt or an observation that are folded.

/** Return the range of a kind of number over the trajectories of a group. */
function rangeOf(kind, trajectories) {
  const { diverging, low, high } = KINDS[kind];
  let least = Infinity, most = -Infinity;
  for (const t of trajectories) {
    t.values[kind].forEach((value, i) => {
      if (value === null || !t.sampled[i]) return;
      least = Math.min(least, value);
      most = Math.max(most, value);
    });
  }
  if (least > most) return null;
  if (diverging) {
    const bound = Math.max(Math.abs(least), Math.abs(most)) || 1;
    return [-bound, bound];
  }
  const range = [low === undefined ? least : Math.min(low, high === undefined ? low : least), high === undefined ? most : high];
  if (range[0] === range[1]) range[1] = range[0] + 1;
  return range;
}

/** Return the colour of a number in a range. */
function colourOf(kind, value, range) {
  const { diverging, reversed } = KINDS[kind];
  let share = Math.min(1, Math.max(0, (value - range[0]) / (range[1] - range[0])));
  if (diverging) {
    const away = share * 2 - 1;
    return away < 0 ? `rgba(214, 40, 57, ${(-away * 0.75).toFixed(3)})` : `rgba(30, 140, 70, ${(away * 0.75).toFixed(3)})`;
  }
  if (reversed) share = 1 - share;
  return `rgba(124, 58, 200, ${(share * 0.75).toFixed(3)})`;
}

function legend(kind, range) {
  if (!range) return make("div", { class: "legend" }, `${KINDS[kind].title}: not computed, or not before the step is done`);
  const scale = make("span", { class: "scale" });
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => colourOf(kind, range[0] + share * (range[1] - range[0]), range));
  scale.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  return make("div", { class: "legend" }, KINDS[kind].title, make("span", {}, shortNumber(range[0])), scale, make("span", {}, shortNumber(range[1])), KINDS[kind].hint);
}

function tokenTitle(t, i) {
  const v = t.values;
  return [
    `token ${i}`,
    `advantage ${shortNumber(v.advantage[i])}`,
    `log-prob ${shortNumber(v.logprob[i])} (engine ${shortNumber(v.engine[i])})`,
    `entropy ${shortNumber(v.entropy[i])}`,
    `staleness ${v.staleness[i] === null ? "–" : v.staleness[i]}`,
  ].join("\n");
}

/** Return the tokens of a trajectory: sampled ones each with a colour, what was read as one text. */
function tokensOf(t, kind, range, most) {
  const box = make("div", { class: "tokens" });
  const images = new Map(t.images.map(([start, num, url]) => [start, { num, url }]));
  let context = "";
  const flush = () => {
    if (!context) return;
    const text = make("span", { class: "context" }, context);
    if (context.length > LONG_CONTEXT) {
      box.append(make("details", {}, make("summary", {}, `${context.length} characters that were read, ending in: ${context.slice(-60)}`), text));
    } else box.append(text);
    context = "";
  };
  let numShown = 0;
  for (let i = 0; i < t.texts.length; i++) {
    const image = images.get(i);
    if (image) {
      flush();
      box.append(make("img", { src: image.url, alt: "image of the prompt" }));
      i += image.num - 1;
      continue;
    }
    if (!t.sampled[i]) { context += t.texts[i]; continue; }
    flush();
    if (numShown++ >= most) {
      const more = make("button", {}, "show all tokens");
      more.addEventListener("click", () => box.replaceWith(tokensOf(t, kind, range, Infinity)));
      box.append(make("p", {}, more));
      return box;
    }
    const token = make("span", { class: "token", title: tokenTitle(t, i) }, withMarks(t.texts[i]));
    const value = t.values[kind][i];
    if (value !== null && range) token.style.backgroundColor = colourOf(kind, value, range);
    box.append(token);
    if (t.turn_rewards[i]) box.append(make("span", { class: "turn" }, `reward ${shortNumber(t.turn_rewards[i])}`));
  }
  flush();
  return box;
}

function factsOf(t) {
  const facts = [`reward ${shortNumber(t.reward)}`];
  if (t.shaped !== t.reward) facts.push(`shaped ${shortNumber(t.shaped)}`);
  for (const [name, value] of Object.entries(t.rewards)) facts.push(`${name} ${shortNumber(value)}`);
  for (const [name, value] of Object.entries(t.env)) facts.push(`${name} ${shortNumber(value)}`);
  facts.push(`${t.sampled.reduce((a, b) => a + b, 0)} of ${t.sampled.length} tokens sampled`);
  if (t.source) facts.push(String(t.source));
  return facts.join(" · ");
}

/** Return the columns of a row beside its prompt, as a table. */
function rowTable(row) {
  return make("table", {}, ...Object.entries(row).map(([name, value]) =>
    make("tr", {}, make("td", { class: "soft" }, name), make("td", {}, make("pre", {}, value)))));
}

/** Return a text in which characters that turn the direction of what follows are written out. */
function withMarks(text) {
  return text.replace(/[\u202a-\u202e\u2066-\u2069]/g, (mark) => `[U+${mark.charCodeAt(0).toString(16).toUpperCase()}]`);
}

/**
 * Return a group, its trajectories side by side.
 * place: {episode, segment} of the one to mark, if any; linkTo: the address of a place; search: a text to tell where it is.
 */
function groupView(group, { kind, place, linkTo, search }) {
  const range = rangeOf(kind, group.trajectories);
  const columns = group.trajectories.map((t) => {
    const title = `episode ${t.episode}${t.segment ? `, segment ${t.segment}` : ""}`;
    const { episode, segment } = t;
    const link = make("a", { href: linkTo({ step: group.step, group: group.group, episode, segment }), title: "link to this episode" }, title);
    const head = make("h2", {}, link);
    if (!t.stopped) head.append(make("span", { class: "flag", title: FLAGS.cut_off.hint }, FLAGS.cut_off.title));
    if (t.error) head.append(make("span", { class: "flag failed" }, "failed"));
    const texts = [t.prompt, t.completion, t.error, ...Object.values(t.row)].join("\n").toLowerCase();
    if (search && texts.includes(search.toLowerCase())) head.append(make("span", { class: "flag found" }, "found"));
    const isHere = Boolean(place) && place.episode === episode && place.segment === segment;
    return make("article", { class: "trajectory", "aria-current": String(isHere) }, head, make("div", { class: "facts" }, factsOf(t)),
      t.error ? make("div", { class: "reason" }, t.error) : null,
      t.why_empty ? make("p", { class: "soft" }, `The policy sampled no token: ${t.why_empty}.`) : tokensOf(t, kind, range, MOST_TOKENS));
  });
  const columnNames = Object.keys(group.row);
  const prompt = make("details", { open: !group.prompt },
    make("summary", {}, `step ${group.step}, group ${group.group}: ${[group.prompt ? "prompt" : "", ...columnNames].filter(Boolean).join(", ")}`),
    group.prompt ? make("pre", {}, group.prompt) : null, rowTable(group.row));
  return make("div", {}, make("div", { class: "panel" }, prompt, legend(kind, range)), make("p", {}), make("div", { class: "side-by-side" }, ...columns));
}
