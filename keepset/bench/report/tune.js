const { rows, dropped, tied } = data;
const asked = data.facts > 0;

const percent = shown((x) => `${(100 * x).toFixed(1)} %`);
const nats = shown((x) => x.toFixed(4));
const times = shown((x) => `× ${x.toFixed(2)}`);
const interval = (figure, format) =>
  format(figure.mean) + (number(figure.low) === null ? "" : ` (${format(figure.low)} to ${format(figure.high)})`);
const pieceCount = (count) => (count === 1 ? "1 piece" : `${integer(count)} pieces`);
const share = (row) => row.kv_bytes / row.kv_bytes_full;
const cost = (row) => row.prefill_seconds / row.prefill_seconds_full;

// ---- header

function header() {
  title(data.model,
    `Recipes compress up to ${pieceCount(data.pieces)} of the text, ${integer(data.tokens)} tokens each, with the same budget. ` +
    `Their predictions over the next ${integer(data.continuation_tokens)} tokens are compared with those of the full cache` +
    (asked ? `, and they are asked for ${integer(data.facts)} facts that were hidden in each piece.` : ".") +
    " After every round the better half of the recipes goes on to more pieces.");
  const facts = [
    ["Budget", `keep=${data.keep}`],
    ["Rounds", data.round === data.rounds ? String(data.rounds) : `${data.round} of ${data.rounds}`],
    ["Full KV cache", data.full.kv_bytes === null ? null : `${(data.full.kv_bytes / 1e6).toFixed(1)} MB`],
    ["Found by the full cache", asked ? interval(data.full.found, percent) : null],
  ];
  for (const [name, value] of facts) {
    if (value !== null) id("facts").append(fact(name, value));
  }
}

// ---- plots: the best, what cannot be told from it, others of the last round, and those that were out before

const GROUPS = [
  { name: data.recipe, colour: "--good", mark: "★", symbol: "star", size: 15, has: (row) => row.recipe === data.recipe },
  { name: "cannot be told from it", colour: "--c1", mark: "◆", symbol: "diamond", size: 10, has: (row) => tied.includes(row.recipe) },
  { name: "last round", colour: "--c0", mark: "●", symbol: "circle", size: 9, has: (row) => row.finalist },
  { name: "out before", colour: "--c7", mark: "○", symbol: "circle-open", size: 8, has: () => true },
];
const groupOf = (row) => GROUPS.find((group) => group.has(row));

function legend() {
  for (const group of GROUPS) {
    if (!rows.some((row) => groupOf(row) === group)) continue;
    const mark = el("span", { className: "mark", ariaHidden: "true" }, group.mark);
    mark.style.color = `var(${group.colour})`;
    document.querySelector(".series").append(el("span", { className: "entry" }, mark, group.name));
  }
}

function draw(name, figure, format, yaxis) {
  const traces = GROUPS.map((group) => {
    const points = rows.filter((row) => groupOf(row) === group && known(figure(row).mean));
    const above = (row) => (known(figure(row).high) ? figure(row).high - figure(row).mean : 0);
    const below = (row) => (known(figure(row).low) ? figure(row).mean - figure(row).low : 0);
    return {
      type: "scatter", mode: "markers", name: label(group.name ?? ""), x: points.map(cost), y: points.map((row) => figure(row).mean),
      hovertext: points.map((row) => `${wrapped(row.recipe)}<br>${interval(figure(row), format)}, ${pieceCount(row.pieces)}`),
      hoverinfo: "text",
      marker: { color: css(group.colour), size: group.size, symbol: group.symbol },
      error_y: {
        type: "data", symmetric: false, array: points.map(above), arrayminus: points.map(below),
        color: css(group.colour), thickness: 1, width: 0,
      },
    };
  }).filter((trace) => trace.x.length);
  chart(id(name), traces, { xaxis: axis("prefill, of the full cache’s", { tickprefix: "×" }), yaxis });
}

function plots() {
  // Before anything is drawn, since it makes the other narrower.
  id("found-figure").hidden = !asked;
  draw("kl", (row) => row.kl, nats, axis("KL divergence, nats (log scale)", { type: "log", zeroline: false, dtick: 1, tickformat: "~g" }));
  if (asked) draw("found", (row) => row.found, percent, axis("facts found", { tickformat: ".0%", range: [-0.03, 1.03] }));
}

// ---- figures

function table() {
  figures(["recipe", "pieces", "MB", "bytes", "KL, nats", "top-1", "prefill", ...(asked ? ["found"] : [])], rows.map((row) => [
    (row.recipe === data.recipe ? "★ " : tied.includes(row.recipe) ? "◆ " : "") + row.recipe,
    integer(row.pieces), (row.kv_bytes / 1e6).toFixed(1), percent(share(row)), interval(row.kl, nats), percent(row.top1),
    times(cost(row)), ...(asked ? [interval(row.found, percent)] : []),
  ]));
  id("plots-note").textContent =
    `Further left is cheaper${asked ? "; a lower KL is better, and so are more facts" : ", lower is better"}. Lines are intervals of 95 % over ` +
    "pieces. Recipes that were out before the last round saw fewer.";
  id("rows-note").textContent =
    "★ the recipe to use, ◆ what cannot be told from it. KL is that of the full cache’s predictions from the recipe’s, a mean per " +
    "token; lower is better. The prefill is the time of one with the recipe, of one with the full cache.";
  id("errors").append(...dropped.map(({ recipe, reason }) => el("li", {}, `${recipe}: ${reason}`)));
}

header();
legend();
table();
plots();
onScheme(plots);
