const rows = data.rows.filter((row) => row.error === null);
const recipes = [...new Set(rows.map((row) => row.recipe))];
const seconds = shown((x) => `${x.toFixed(2)} s`);
const rate = shown((x) => x.toFixed(1));
const megabytes = shown((x) => `${(x / 1e6).toFixed(1)} MB`);

function header() {
  title(data.model,
    `${integer(data.output_tokens)} tokens generated after each prompt, ${integer(data.rounds)} rounds in turns.`);
  id("facts").append(fact("Device", data.device), fact("Precision", data.dtype));
}

// What one round says of each figure.
const of = {
  first_seconds: (round) => round.first_seconds,
  tokens_per_second: (round, row) => (row.output_tokens - 1) / round.rest_seconds,
  seconds: (round) => round.first_seconds + round.rest_seconds,
  kv_bytes: (round) => round.kv_bytes / 1e6,
  peak_bytes: (round) => (round.peak_bytes === null ? null : round.peak_bytes / 1e6),
};
const units = { first_seconds: "seconds", seconds: "seconds", tokens_per_second: "tokens per second", kv_bytes: "MB", peak_bytes: "MB" };

// The full cache, which comes first, is grey.
const hue = (i) => (i ? i - 1 + (i > 7) : 7);

function draw(name) {
  const traces = recipes.map((recipe, i) => {
    const here = rows.filter((row) => row.recipe === recipe && known(row[name]));
    const rounds = here.map((row) => row.rounds.map((round) => of[name](round, row)).filter(known));
    const scale = name.endsWith("bytes") ? 1e-6 : 1;
    const y = here.map((row) => row[name] * scale);
    return {
      type: "scatter", mode: "lines+markers", name: label(recipe), x: here.map((row) => row.prompt_tokens), y,
      error_y: {
        type: "data", symmetric: false, thickness: 1,
        array: y.map((value, j) => Math.max(...rounds[j]) - value),
        arrayminus: y.map((value, j) => value - Math.min(...rounds[j])),
      },
      line: { color: colourOf(hue(i)), width: 2, dash: i ? "solid" : "dash" }, marker: { symbol: symbolOf(hue(i)), size: 7 },
      hovertemplate: `%{x} tokens: %{y:.2f} ${units[name]}<extra>${label(recipe)}</extra>`,
    };
  });
  if (!traces.some((trace) => trace.x.length)) {
    id(name).closest("figure").hidden = true;
    return;
  }
  chart(id(name), traces, {
    xaxis: axis("tokens of the prompt", { rangemode: "tozero" }),
    yaxis: axis(units[name], { rangemode: "tozero" }),
  });
}

function table() {
  figures(["prompt and recipe", "first token", "tokens/s", "latency", "KV cache", "peak memory"], rows.map((row) => [
    `${integer(row.prompt_tokens)}, ${row.recipe}`, seconds(row.first_seconds), rate(row.tokens_per_second),
    seconds(row.seconds), megabytes(row.kv_bytes), megabytes(row.peak_bytes),
  ]));
  for (const row of data.rows) {
    if (row.error !== null) id("errors").append(el("li", {}, `${row.recipe}, ${integer(row.prompt_tokens)}: ${row.error}`));
  }
}

const plots = () => Object.keys(of).forEach(draw);
header();
if (recipes.length > 1) legends(recipes.map((recipe, i) => [recipe, hue(i), i === 0]));
table();
plots();
onScheme(plots);
