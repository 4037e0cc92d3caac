const { configuration, summary } = data;
const { baseline, needles, trades } = summary;
const FULL = "full cache";

// Averages over groups of tasks come first.
const rows = [...summary.averages, ...summary.rows];
const tasks = [...new Set(rows.map((row) => row.task))];
const methods = [...new Set(rows.map((row) => row.method))].filter((method) => method !== FULL);
const hidden = new Set();
const here = (row) => row.task === id("task").value;

const percent = shown((x) => `${(100 * x).toFixed(1)} %`);
// What rounds to zero has no sign.
const points = shown((x) => {
  const rounded = Math.round(1000 * x) / 10;
  return `${rounded > 0 ? "+" : ""}${(rounded || 0).toFixed(1)} %`;
});
const seconds = shown((x) => x.toFixed(x < 10 ? 3 : 1));
const counted = (n, of, what) => `${n === of ? integer(n) : `${integer(n)} of ${integer(of)}`}${what}`;
const between = (figure, format) => (missing(figure.low) ? "" : `${format(figure.low)} to ${format(figure.high)}`);
const failures = (row) =>
  `failed on ${row.failed === row.examples ? `all ${integer(row.failed)}` : counted(row.failed, row.examples, "")} examples: ${row.error}`;
const marked = (row) => (row.recipe === FULL ? el("span", { className: "mark" }) : mark(methods.indexOf(row.method)));

// ---- header

function header() {
  const recipes = new Set(summary.rows.map((row) => row.recipe).filter((recipe) => recipe !== FULL)).size;
  const all = new Set(summary.rows.map((row) => row.task)).size;
  const ran = summary.rows.reduce((sum, row) => sum + row.examples, 0);
  title(data.model,
    `${counted(recipes, recipes, recipes === 1 ? " recipe" : " recipes")} on ` +
    `${counted(all, all, all === 1 ? " task" : " tasks")}. ` +
    "Every score has its interval of 95 % over examples.");
  id("facts").append(fact("Answers judged", integer(ran)), fact("Compared with", baseline));
  for (const [name, value] of Object.entries(configuration)) id("origin").append(fact(name[0].toUpperCase() + name.slice(1), value));
}

// ---- plot

const AXES = {
  share: ["KV cache bytes", "KV cache bytes, share of the full cache"],
  keep: ["Entries", "Entries kept, share of all"],
};
let across = "share";

function trace(name, drawn, colour, symbol, more) {
  return {
    type: "scatter", mode: "lines+markers", cliponaxis: false, name: label(name),
    x: drawn.map((row) => row[across]), y: drawn.map((row) => row.score.value),
    hovertext: drawn.map((row) =>
      `${wrapped(row.recipe)}<br>${percent(row.score.value)} (${between(row.score, percent)})<br>` +
      `${percent(row.share)} of the bytes, ${percent(row.keep)} of the entries<br>` +
      counted(row.examples, row.examples_of, " examples") + (row.failed ? `, of which ${integer(row.failed)} failed` : "")),
    hoverinfo: "text",
    error_y: {
      type: "data", symmetric: false, thickness: 1, width: 3, color: colour,
      array: drawn.map((row) => row.score.high - row.score.value), arrayminus: drawn.map((row) => row.score.value - row.score.low),
    },
    line: { color: colour, width: 1.75 },
    marker: { color: colour, size: 9, symbol: drawn.map((row) => symbol + (row.failed ? "-open" : "")) },
    ...more,
  };
}

function draw() {
  const drawn = rows.filter((row) => here(row) && row.score !== null);
  const traces = methods.map((method, i) => trace(
    method, drawn.filter((row) => row.method === method).sort((a, b) => a[across] - b[across]), colourOf(i), symbolOf(i),
    { visible: !hidden.has(method) }));
  const full = drawn.find((row) => row.recipe === FULL);
  if (full) traces.push(trace(FULL, [full], css("--muted"), "star", { mode: "markers" }));
  const level = full && { type: "line", xref: "paper", x0: 0, x1: 1, y0: full.score.value, y1: full.score.value };
  chart(id("plot"), traces, {
    xaxis: axis(AXES[across][1], { tickformat: ".0%", rangemode: "tozero", zeroline: false, uirevision: across }),
    yaxis: axis("Score", { tickformat: ".0%", rangemode: "tozero", zeroline: false }),
    shapes: level ? [{ ...level, line: { color: css("--muted"), width: 1, dash: "dash" } }] : [],
  });
  id("plot-note").textContent =
    "The star and the dashed line are the full cache’s." + (drawn.some((row) => row.failed)
      ? " Hollow markers: the recipe failed on some of the examples, which count as not answered." : "");
}

// ---- figures

const withInterval = (figure, format) =>
  (figure === null ? "–" : el("span", {}, format(figure.value), el("br"), el("small", {}, between(figure, format))));
const value = (figure) => figure?.value ?? null;

const COLUMNS = [
  ["Recipe", (row) => row.recipe, null, null, "recipe"],
  ["Score\n95 %", (row) => value(row.score), (row) => withInterval(row.score, percent)],
  ["Difference\n95 %", (row) => value(row.difference), (row) => withInterval(row.difference, points)],
  ["Examples\n ", (row) => row.examples, (row) => counted(row.examples, row.examples_of, "")],
  ["KV cache\nbytes", (row) => row.kv_bytes, (row) => bytes(row.kv_bytes)],
  ["KV cache\nof full", (row) => row.share, (row) => percent(row.share)],
  ["Entries\nkept", (row) => row.keep, (row) => percent(row.keep)],
  ["Generated\ntokens", (row) => row.tokens, (row) => shown((x) => x.toFixed(1))(row.tokens)],
  ["Finished\n ", (row) => row.finished, (row) => percent(row.finished)],
  ["Repetition\n4-grams", (row) => row.repetition, (row) => percent(row.repetition)],
  ["Prefill\ns", (row) => row.prefill_seconds, (row) => seconds(row.prefill_seconds)],
  ["Select\ns", (row) => row.select_seconds, (row) => seconds(row.select_seconds)],
  ["Decode\ns", (row) => row.decode_seconds, (row) => seconds(row.decode_seconds)],
  ...(rows.every((row) => row.peak_bytes === null) ? [] : [
    ["Side by\nside", (row) => row.batch, (row) => shown((x) => x.toFixed(1))(row.batch)],
    ["Peak\nbytes", (row) => row.peak_bytes, (row) => shown(bytes)(row.peak_bytes)],
  ]),
];
const without = (row) => row.score === null;

function table() {
  const lines = rows.filter(here).map((row) => {
    const name = el("div", {}, marked(row), el("code", {}, ...recipeParts(row.recipe)));
    const th = el("th", { scope: "row", className: "recipe" }, name);
    if (row.failed && !without(row)) th.append(el("div", { className: "failed" }, failures(row)));
    const tr = el("tr", {}, th);
    if (without(row)) {
      const why = row.tasks < row.tasks_of ? `has a score on ${row.tasks} of ${row.tasks_of} tasks` : "";
      const text = [why, row.failed ? failures(row) : ""].filter(Boolean).join("; ");
      tr.append(el("td", { colSpan: COLUMNS.length - 1, className: "text failed" }, el("div", {}, text)));
    } else for (const [, , show] of COLUMNS.slice(1)) tr.append(el("td", {}, show(row)));
    return { row, tr };
  });
  sortable(id("rows"), COLUMNS, lines, without);
  const cut = Math.max(...lines.map(({ row }) => row.cut), 0);
  id("rows-note").textContent =
    (cut ? `Of ${integer(cut)} examples the context was cut in its middle, to what the model takes. ` : "") + `Differences are to ${baseline}${methods.includes(baseline) ? " with the same budget" : ""}, on the examples that both were run on. ` +
    "Examples on which a recipe failed count as not answered; bytes and seconds are means over the others. A click on a column’s name sorts.";
}

const reach = (trade, tolerance) => trade.reach.find((each) => each.tolerance === tolerance);
const tolerances = [...new Set(trades.flatMap((trade) => trade.reach.map((each) => each.tolerance)))];
const removed = (found) => {
  if (!found) return "–";
  const cell = withInterval(found.removed, percent);
  if (found.at_least) cell.prepend("≥ ");
  return cell;
};
const OVER_BUDGETS = [
  ["Method", (trade) => trade.method, null, null, "recipe"],
  ["Area under the curve\n95 %", (trade) => value(trade.area), (trade) => withInterval(trade.area, percent)],
  ["From\nof full", (trade) => trade.smallest, (trade) => percent(trade.smallest)],
  ["Budgets\n ", (trade) => trade.budgets, (trade) => integer(trade.budgets)],
  ["Examples\n ", (trade) => trade.examples, (trade) => integer(trade.examples)],
  ...tolerances.map((tolerance) => [
    `Can go\nat a loss of ${(100 * tolerance).toFixed(0)} %`,
    (trade) => value(reach(trade, tolerance)?.removed), (trade) => removed(reach(trade, tolerance)),
  ]),
];

function overBudgets() {
  const shownTrades = trades.filter(here);
  id("trades-section").hidden = !shownTrades.length;
  const lines = shownTrades.map((trade) => {
    const name = el("div", {}, marked(trade), el("code", {}, ...recipeParts(trade.method)));
    const th = el("th", { scope: "row", className: "recipe" }, name);
    if (trade.failed) th.append(el("div", { className: "failed" }, `failures, counted as not answered: ${integer(trade.failed)}`));
    const tr = el("tr", {}, th);
    for (const [, , show] of OVER_BUDGETS.slice(1)) tr.append(el("td", {}, show(trade)));
    return { row: trade, tr };
  });
  sortable(id("trades"), OVER_BUDGETS, lines, () => false);
  id("trades-note").textContent =
    "The area under accuracy over the share of bytes held, from the smallest budget to the full cache, as a mean score; areas compare " +
    "where they begin at the same share. What can go is the largest share of bytes whose removal costs at most so much of the full cache’s " +
    "score, linear between budgets, ≥ where no smaller budget was tried; tasks on which the full cache scores nothing are left out.";
}

// ---- needles

function maps() {
  const task = id("needle-task").value;
  const drawn = needles.filter((map) => map.task === task);
  const parts = drawn[0].scores.map((_, part) => part).filter((part) => drawn.some((map) => map.scores[part].some(known)));
  const order = (map) => (map.recipe === FULL ? 0 : 1);
  id("maps").replaceChildren(...drawn.sort((a, b) => order(a) - order(b)).map((map) => {
    const head = el("tr", {}, el("th", { scope: "col" }, "depth"), ...map.lengths.map((length) => el("th", { scope: "col" }, integer(length))));
    const body = parts.map((part) => el("tr", {},
      el("th", { scope: "row" }, `${10 * part}–${10 * part + 10} %`),
      ...map.scores[part].map((score, i) => {
        const td = el("td", { title: `${integer(map.examples[part][i])} examples` }, known(score) ? (100 * score).toFixed(0) : "–");
        if (known(score)) td.style.setProperty("--share", score);
        return td;
      })));
    return el("figure", {}, el("figcaption", {}, el("code", {}, ...recipeParts(map.recipe))),
      el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
  }));
}

function show() {
  draw();
  table();
  overBudgets();
}

function options(name, values, change) {
  id(name).append(...values.map((each) => el("option", { value: each }, each)));
  id(name).addEventListener("change", change);
}

header();
options("task", tasks, show);
choice("axis", Object.entries(AXES).map(([key, [name]]) => [key, name]), across, (key) => { across = key; draw(); });
toggles(methods, hidden, draw);
show();
if (needles.length) {
  id("needles-section").hidden = false;
  options("needle-task", [...new Set(needles.map((map) => map.task))], maps);
  maps();
}
onScheme(draw);
