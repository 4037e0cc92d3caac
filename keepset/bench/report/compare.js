const { comparison, tokens, layers, heads, kept } = data;
const { rows } = comparison;

// ---- numbers

const finite = (value) => known(number(value));
const percent = shown((x) => `${(100 * x).toFixed(1)} %`);
const seconds = shown((x) => x.toFixed(x < 10 ? 3 : 1));
const divergence = shown((x) => (x === 0 ? "0" : Math.abs(x) < 1e-3 ? x.toExponential(1) : x.toFixed(4)));
const signed = shown((x) => (x > 0 ? "+" : "") + x.toFixed(4));
const ofFull = (row) => (row.kv_bytes_full ? row.kv_bytes / row.kv_bytes_full : null);

// ---- header

const failed = (row) => row.error !== undefined && row.error !== null;
const ran = rows.filter((row) => !failed(row));
const full = comparison.full ?? {};
const needle = comparison.needle ?? null;
const fullBytes = full.kv_bytes ?? ran[0]?.kv_bytes_full ?? null;
const decoding = finite(comparison.drift_tokens);
const fullPrefill = full.prefill_seconds ?? ran[0]?.prefill_seconds_full ?? null;

function header() {
  const predicted = comparison.continuation_tokens;
  title(comparison.model, decoding
    ? `A text of ${integer(predicted)} tokens follows a prompt of ${integer(comparison.tokens)}, fed as if decoded. ` +
      "Each recipe compresses the model’s KV cache again and again on the way. Its predictions after its first " +
      "compression are compared with those of the full cache; bytes are means over the same tokens."
    : `Each recipe keeps part of the model’s KV cache after a prompt of ${integer(comparison.tokens)} tokens. ` +
      `Its predictions ${predicted ? `over the next ${integer(predicted)} tokens ` : ""}` +
      "are compared with those of the full cache on the same text.");
  const lost = rows.length - ran.length;
  const facts = [
    ["Recipes", lost ? `${rows.length}, of which ${lost} failed` : `${rows.length}`],
    [decoding ? "Full KV cache: mean" : "Full KV cache", bytes(fullBytes)],
    ["Full cache: prefill", fullPrefill === null ? null : `${seconds(fullPrefill)} s`],
    ["Full cache: NLL", finite(full.nll) ? `${number(full.nll).toFixed(4)} nats/token` : null],
  ];
  const asked = [
    ["Asked after compression", needle?.question],
    ["A right answer contains", needle?.answer],
    ["The full cache answers", needle && full.answer],
  ];
  for (const [box, named] of [["facts", facts], ["needle-facts", asked]]) {
    for (const [name, value] of named) if (value !== null && value !== undefined) id(box).append(fact(name, value));
  }
}

const methodOf = (row) => row.method ?? row.recipe;
const methods = [...new Set(ran.map(methodOf))];
const hiddenMethods = new Set();

// ---- plot

const METRICS = {
  kl: {
    name: "KL", axis: "KL divergence, nats (log scale)", format: divergence, unit: " nats", log: true,
    note: "Mean KL(full ‖ compressed) per token. Lower is better.",
  },
  top1: {
    name: "Top-1", axis: "Top-1 agreement", format: percent, unit: "", tickformat: ".0%",
    note: "Share of tokens at which both predict the same next token. Higher is better.",
  },
  nll_delta: {
    name: "NLL delta", axis: "NLL delta, nats per token", format: signed, unit: " nats",
    note: "Negative log-likelihood of the text, minus the full cache’s. Closer to zero is better.",
  },
};
let metric = "kl";

function traces() {
  const { name, format, unit, log } = METRICS[metric];
  const plotted = ran.filter((row) => finite(row[metric]) && finite(ofFull(row)));
  const positive = plotted.map((row) => row[metric]).filter((value) => value > 0);
  // A log axis has no zero: what is not positive stands, hollow, below the smallest positive value.
  const floor = positive.length ? Math.min(...positive) / 4 : 1e-6;
  const result = methods.map((method, i) => {
    const points = plotted.filter((row) => methodOf(row) === method).sort((a, b) => ofFull(a) - ofFull(b));
    const colour = colourOf(i), symbol = symbolOf(i);
    return {
      type: "scatter", mode: "lines+markers", name: label(method), visible: !hiddenMethods.has(method),
      x: points.map(ofFull),
      y: points.map((row) => (log && row[metric] <= 0 ? floor : row[metric])),
      hovertext: points.map((row) =>
        `${wrapped(row.recipe)}<br>${name} ${format(row[metric])}${unit}<br>` +
        `${percent(ofFull(row))} of full, ${bytes(row.kv_bytes)}`),
      hoverinfo: "text",
      line: { color: colour, width: 1.75 },
      marker: { color: colour, size: 9, symbol: points.map((row) => symbol + (log && row[metric] <= 0 ? "-open" : "")) },
    };
  });
  return { result, clipped: log && positive.length < plotted.length };
}

const logarithmic = () => ({
  type: "log", zeroline: false, dtick: 1, tickformat: "~g", minor: { dtick: "D1", showgrid: true, gridcolor: css("--panel") },
});

function draw() {
  const { result, clipped } = traces();
  const { axis: text, log, tickformat, note } = METRICS[metric];
  id("plot-note").textContent = note + (clipped ? ` ${HOLLOW}` : "");
  chart(id("plot"), result, {
    xaxis: axis("KV cache bytes, share of the full cache", { tickformat: ".0%", rangemode: "tozero", zeroline: false, uirevision: "x" }),
    yaxis: axis(text, { type: "linear", tickformat, uirevision: metric, ...(log ? logarithmic() : {}) }),
  });
  if (drifting.length) drawDrift();
}

// ---- drift: KL of one part of the text after another, a line per recipe

const HOLLOW = "Hollow markers: no measurable divergence, drawn at the axis’s lower end.";
const DASHES = ["solid", "dash", "dot", "dashdot"];
const drifting = decoding ? ran.filter((row) => row.kl_drift?.length > 1) : [];

function drawDrift() {
  const positive = drifting.flatMap((row) => row.kl_drift.map(number)).filter((value) => value > 0);
  const floor = positive.length ? Math.min(...positive) / 4 : 1e-6;
  const size = comparison.drift_tokens;
  const seen = new Map();
  const lines = drifting.map((row) => {
    const i = methods.indexOf(methodOf(row));
    const place = seen.get(i) ?? 0;
    seen.set(i, place + 1);
    const values = row.kl_drift.map(number);
    const colour = colourOf(i), symbol = symbolOf(i);
    const end = (part) => Math.min((part + 1) * size, comparison.continuation_tokens);
    return {
      type: "scatter", mode: "lines+markers", name: label(row.recipe), visible: !hiddenMethods.has(methodOf(row)),
      x: values.map((_, part) => end(part)),
      y: values.map((value) => (value > 0 ? value : value <= 0 ? floor : null)),
      hovertext: values.map((value, part) =>
        `${wrapped(row.recipe)}<br>KL ${divergence(value)} nats<br>tokens ${integer(part * size)} to ${integer(end(part))}`),
      hoverinfo: "text",
      line: { color: colour, width: 1.75, dash: DASHES[place % DASHES.length] },
      marker: { color: colour, size: 8, symbol: values.map((value) => symbol + (value > 0 ? "" : "-open")) },
    };
  });
  id("drift-note").textContent =
    `Mean KL(full ‖ compressed) of every ${integer(size)} tokens after the prompt, one line per recipe; ` +
    `budgets of one method differ in their dashes.${drifting.some((row) => row.kl_drift.some((value) => number(value) <= 0)) ? ` ${HOLLOW}` : ""}`;
  chart(id("drift-plot"), lines, {
    xaxis: axis("Tokens after the prompt", { rangemode: "tozero", zeroline: false }),
    yaxis: axis("KL divergence, nats (log scale)", logarithmic()),
  });
}

function plot() {
  if (!ran.length) {
    id("fidelity").hidden = true;
    return;
  }
  choice("metric", Object.entries(METRICS).map(([key, { name }]) => [key, name]), metric, (key) => { metric = key; draw(); });
  toggles(methods, hiddenMethods, draw);
  id("drift").hidden = !drifting.length;
  onScheme(draw);
  draw();
}

// ---- table

const found = (value) => {
  if (value === null || value === undefined) return "–";
  return el("span", { className: value ? "found" : "lost" }, value ? "✓ found" : "✗ lost");
};
const answered = (value) => (value ? el("span", { title: value }, value) : "–");
const has = (key) => ran.some((row) => row[key] !== null && row[key] !== undefined);

// name and unit, value to sort by, what the cell shows, the full cache's cell, classes
const COLUMNS = [
  ["Recipe", (row) => row.recipe, null, null, "recipe"],
  ["Entries\nkept", (row) => number(row.keep), percent, 1],
  ["KV cache\nbytes", (row) => number(row.kv_bytes), bytes, fullBytes],
  ...(decoding ? [["KV peak\nbytes", (row) => number(row.kv_bytes_peak), bytes, full.kv_bytes_peak]] : []),
  ["KV cache\nof full", ofFull, percent, 1],
  ["KL\nnats", (row) => number(row.kl), divergence, 0],
  ["NLL delta\nnats", (row) => number(row.nll_delta), signed, 0],
  ["Top-1\nagreement", (row) => number(row.top1), percent, 1],
  ["Prefill\ns", (row) => number(row.prefill_seconds), seconds, fullPrefill],
  ["Select\ns", (row) => number(row.select_seconds), seconds, null],
  ...(has("needle_found") ? [["Fact", (row) => row.needle_found, found, full.needle_found, "text"]] : []),
  ...(has("answer") ? [["Answer", (row) => row.answer, answered, full.answer, "text answer"]] : []),
];

function recipeCell(row, i) {
  const parts = recipeParts(row.recipe);
  const name = kept[i]
    ? el("button", { type: "button", className: "link", title: "Show what it kept" }, ...parts)
    : el("code", {}, ...parts);
  if (kept[i]) {
    name.addEventListener("click", () => {
      id("recipe").value = String(i);
      shade();
      id("text-section").scrollIntoView();
    });
  }
  const marked = failed(row) ? el("span", { className: "mark lost", ariaHidden: "true" }, "✗") : mark(methods.indexOf(methodOf(row)));
  return el("th", { scope: "row", className: "recipe" }, el("div", {}, marked, name));
}

function table() {
  const lines = rows.map((row, i) => {
    const tr = el("tr", {}, recipeCell(row, i));
    tr.dataset.row = i;
    if (failed(row)) tr.append(el("td", { colSpan: COLUMNS.length - 1, className: "text failed" }, el("div", {}, `failed: ${row.error}`)));
    else for (const [, value, show, , classes = ""] of COLUMNS.slice(1)) tr.append(el("td", { className: classes }, show(value(row))));
    return { row, tr };
  });
  // The largest budget first, and the best of each.
  const budget = (row) => number(row.requested) ?? 0;
  const lost = (row) => row.needle_found === false;
  lines.sort(({ row: a }, { row: b }) =>
    failed(a) - failed(b) || budget(b) - budget(a) || lost(a) - lost(b) || compare(number(a.kl), number(b.kl), 1));
  sortable(id("rows"), COLUMNS, lines, failed);

  const reference = el("tr", {}, el("th", { scope: "row", className: "recipe" }, "full cache"));
  for (const [, , show, value, classes = ""] of COLUMNS.slice(1)) reference.append(el("td", { className: classes }, show(value ?? null)));
  document.querySelector("#rows .reference").append(reference);
}

// ---- text

const bitsets = await Promise.all(kept.map((packed) => packed && unpack(packed)));
const shareOf = ({ from, to }) => counts.subarray(from, to).reduce((sum, count) => sum + count, 0) / selectedHeads / (to - from);
const shownText = tokenText((piece) => {
  if (!selectedHeads) return "";
  const share = percent(shareOf(piece));
  return piece.to - piece.from > 1 ? `kept by ${share} of ${headCount(selectedHeads)}, on the mean of its tokens`
    : `kept by ${counts[piece.from]} of ${headCount(selectedHeads)} (${share})`;
});
const drawn = shownText.write(tokens);
let counts = new Uint32Array(tokens.length);
let selectedHeads = 0;

function selected(name, count) {
  return id(name).value === "all" ? [...Array(count).keys()] : [Number(id(name).value)];
}

const headCount = (count) => (count === 1 ? "1 head" : `${integer(count)} heads`);

function shade() {
  const row = Number(id("recipe").value);
  const bits = bitsets[row];
  const pairs = selected("layer", layers).flatMap((layer) => selected("head", heads).map((head) => layer * heads + head));
  counts = new Uint32Array(tokens.length);
  selectedHeads = pairs.length;
  for (const pair of pairs) {
    for (let t = 0; t < tokens.length; t++) counts[t] += bit(bits, pair * tokens.length + t);
  }
  for (const piece of drawn) {
    const share = shareOf(piece);
    piece.span.style.setProperty("--share", share.toFixed(4));
    piece.span.classList.toggle("dropped", share === 0);
  }

  const total = counts.reduce((sum, count) => sum + count, 0);
  const gone = counts.reduce((sum, count) => sum + (count === 0), 0);
  const entries = pairs.length * tokens.length;
  id("share").textContent =
    `${percent(total / entries)} kept: ${integer(total)} of ${integer(entries)} entries` +
    ` in ${headCount(selectedHeads)}; ` +
    `${integer(gone)} of ${integer(tokens.length)} tokens kept by none.`;
  for (const tr of document.querySelectorAll("#rows .results tr")) {
    if (Number(tr.dataset.row) === row) tr.ariaCurrent = "true";
    else tr.removeAttribute("aria-current");
  }
  shownText.refresh();
}

function underlineNeedle() {
  const start = needle?.answer ? tokens.join("").indexOf(needle.answer) : -1;
  if (start < 0) return;
  let from = 0;
  const marked = drawn.filter(({ text }) => {
    const begin = from;
    from += text.length;
    return begin < start + needle.answer.length && from > start;
  });
  for (const { span } of marked) span.classList.add("needle");
  id("to-needle").hidden = false;
  id("to-needle").addEventListener("click", () => marked[0].span.scrollIntoView({ block: "center" }));
}

function text() {
  id("text-section").hidden = !tokens.length;
  underlineNeedle();
  for (let i = 0; i <= 10; i++) {
    const step = el("span");
    step.style.setProperty("--share", i / 10);
    id("scale").append(step);
  }

  const recipe = id("recipe");
  rows.forEach((row, i) => { if (kept[i]) recipe.append(el("option", { value: i }, row.recipe)); });
  for (const [name, count] of [["layer", layers], ["head", heads]]) {
    id(name).append(el("option", { value: "all" }, `all ${count}`));
    for (let i = 0; i < count; i++) id(name).append(el("option", { value: i }, String(i)));
  }
  for (const select of [recipe, id("layer"), id("head")]) select.addEventListener("change", shade);
  // The best of the smallest that still answers; what keeps everything has nothing to show.
  const [first] = [...rows.keys()].filter((i) => kept[i] && rows[i].keep < 1).sort((a, b) =>
    Number(rows[a].needle_found === false) - Number(rows[b].needle_found === false) ||
    rows[a].keep.toFixed(2) - rows[b].keep.toFixed(2) || number(rows[a].kl) - number(rows[b].kl));
  if (first !== undefined) recipe.value = String(first);
  if (recipe.options.length) shade();
  else {
    for (const select of [recipe, id("layer"), id("head")]) select.disabled = true;
    id("share").textContent = "No recipe ran to its end, so nothing is shaded.";
  }
}

header();
table();
text();
plot();
