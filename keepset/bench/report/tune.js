const { rows, dropped, tied } = data;
const asked = data.facts > 0;

const percent = shown((x) => `${(100 * x).toFixed(1)} %`);
const nats = shown((x) => x.toFixed(4));
const times = shown((x) => `× ${x.toFixed(2)}`);
const interval = (figure, format) =>
  format(figure.mean) + (number(figure.low) === null ? "" : ` (${format(figure.low)} to ${format(figure.high)})`);
const share = (row) => row.kv_bytes / row.kv_bytes_full;
const cost = (row) => row.prefill_seconds / row.prefill_seconds_full;

// ---- header

function header() {
  title(data.model,
    `Every recipe compresses ${integer(data.pieces)} pieces of the text, ${integer(data.tokens)} tokens each, with the same budget. ` +
    `Its predictions over the next ${integer(data.continuation_tokens)} tokens are compared with those of the full cache` +
    (asked ? `, and it is asked for ${integer(data.facts)} facts that were hidden in each piece.` : ".") +
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
  id("verdict").append(...data.verdict.map((sentence) => el("p", { className: "lead" }, sentence)));
}

// ---- plots: the best, what cannot be told from it, others of the last round, and those that were out before

const GROUPS = [
  { name: "used", named: true, colour: "--good", symbol: "star", size: 15, has: (row) => row.recipe === data.recipe },
  { name: "tied with it", named: true, colour: "--c1", symbol: "diamond", size: 10, has: (row) => tied.includes(row.recipe) },
  { name: "last round", colour: "--c0", symbol: "circle", size: 9, has: (row) => row.finalist },
  { name: "out before", colour: "--c7", symbol: "circle-open", size: 8, has: () => true },
];
const groupOf = (row) => GROUPS.find((group) => group.has(row));

function draw(name, x, figure, format, xaxis, yaxis) {
  // Where nothing is to be used yet, the best so far have names.
  const isNamed = (row) => groupOf(row).named || (data.recipe === null && rows.indexOf(row) < 3);
  const short = (row) => label(row.method ?? row.recipe.replace(/,? ?keep=[^,)]*/, "").replace("()", ""));
  const traces = GROUPS.map((group) => {
    const points = rows.filter((row) => groupOf(row) === group && known(figure(row).mean));
    const above = (row) => (known(figure(row).high) ? figure(row).high - figure(row).mean : 0);
    const below = (row) => (known(figure(row).low) ? figure(row).mean - figure(row).low : 0);
    return {
      type: "scatter", mode: "markers+text", name: group.name, textposition: "top center",
      text: points.map((row) => (isNamed(row) ? short(row) : "")), x: points.map(x), y: points.map((row) => figure(row).mean),
      hovertext: points.map((row) => `${wrapped(row.recipe)}<br>${interval(figure(row), format)}, ${row.pieces} pieces`),
      hoverinfo: "text",
      marker: { color: css(group.colour), size: group.size, symbol: group.symbol },
      error_y: {
        type: "data", symmetric: false, array: points.map(above), arrayminus: points.map(below),
        color: css(group.colour), thickness: 1, width: 0,
      },
    };
  }).filter((trace) => trace.x.length);
  chart(id(name), traces, {
    ...LEGEND, xaxis, yaxis,
  });
}

function plots() {
  const kl = axis("KL divergence, nats (log scale)", { type: "log", zeroline: false, dtick: 1, tickformat: "~g" });
  const bytesAxis = axis("share of the full cache’s bytes", { tickformat: ".0%", rangemode: "tozero" });
  // Before anything is drawn, since it makes the others narrower.
  id("found-figure").hidden = !asked;
  draw("bytes", share, (row) => row.kl, nats, bytesAxis, kl);
  draw("prefill", cost, (row) => row.kl, nats, axis("prefill, of the full cache’s", { tickprefix: "×" }), kl);
  if (asked) draw("found", share, (row) => row.found, percent, bytesAxis, axis("facts found", { tickformat: ".0%", range: [-0.03, 1.03] }));
}

// ---- figures

function table() {
  figures(["", "pieces", "MB", "bytes", "KL, nats", "top-1", "prefill", ...(asked ? ["found"] : [])], rows.map((row) => [
    (row.recipe === data.recipe ? "★ " : tied.includes(row.recipe) ? "◆ " : "") + row.recipe,
    integer(row.pieces), (row.kv_bytes / 1e6).toFixed(1), percent(share(row)), interval(row.kl, nats), percent(row.top1),
    times(cost(row)), ...(asked ? [interval(row.found, percent)] : []),
  ]));
  id("plots-note").textContent = "Lines are intervals of 95 % over pieces. Recipes that were out before the last round saw fewer.";
  id("rows-note").textContent =
    "★ the recipe to use, ◆ what cannot be told from it. KL is that of the full cache’s predictions from the recipe’s, a mean per " +
    "token; lower is better. The prefill is the time of one with the recipe, of one with the full cache.";
  id("errors").append(...dropped.map(({ recipe, reason }) => el("li", {}, `${recipe}: ${reason}`)));
}

header();
table();
plots();
onScheme(plots);
