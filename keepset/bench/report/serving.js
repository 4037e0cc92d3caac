const { load, servers, rows } = data;

// ---- header

function header() {
  if (servers.length > 1) legends(servers.map((server, i) => [server.name, hue(i), false]));
  title(data.model,
    (load.question_tokens
      ? `${integer(load.requests)} documents of ${integer(load.prompt_tokens)} tokens, each asked a question of ` +
        `${integer(load.question_tokens)} in every round, answered with `
      : `${integer(load.requests)} requests of ${integer(load.prompt_tokens)} tokens, each answered with `) +
    `${integer(load.output_tokens)} more, at most ${integer(load.concurrency)} at once` +
    (load.rounds > 1 ? `, in ${load.rounds} rounds.` : "."));
  const facts = [
    ["Recipe", data.recipe],
    ["Options for vLLM", data.options.join(" ") || null],
    ["Seed", String(load.seed)],
    ["keepset", data.keepset],
  ];
  for (const [name, value] of facts) {
    if (value !== null) id("facts").append(fact(name, value));
  }
}

// ---- plots

const hue = (i) => (servers.length > 1 && i === 0 ? 7 : 0);

function draw(name, traces, x, y, more = {}) {
  const box = id(name);
  if (!traces.some((trace) => trace.x.length)) {
    box.replaceChildren(el("p", { className: "note" }, "Nothing was measured."));
    return;
  }
  chart(box, traces, {
    // Beyond the last point, so that a line that ends upright is seen.
    xaxis: axis(x, { range: [0, 1.04 * Math.max(...traces.flatMap((trace) => trace.x))] }),
    yaxis: axis(y, { rangemode: "tozero", ...more }),
  });
}

// Rounds follow one another, with a gap between them.
function series(server, key) {
  const x = [], y = [];
  let before = 0;
  for (const round of server.rounds) {
    if (x.length) { x.push(before); y.push(null); }
    for (const sample of round.samples) {
      if (!known(sample[key]) || sample.time <= 0) continue;
      x.push(before + sample.time);
      y.push(sample[key]);
    }
    before += round.seconds + 1;
  }
  return { x, y };
}

function times(key, y) {
  return servers.map((server, i) => ({
    type: "scatter", mode: "lines", name: label(server.name), ...series(server, key), connectgaps: false,
    line: { color: colourOf(hue(i)), width: 2 },
    hovertemplate: `%{x:.1f} s: %{y:${y}}<extra>${label(server.name)}</extra>`,
  }));
}

function shares(key) {
  return servers.map((server, i) => {
    const values = server.rounds.flatMap((round) => round.requests)
      .filter((request) => request.error === null && known(request[key]))
      .map((request) => request[key]).sort((a, b) => a - b);
    return {
      type: "scatter", mode: "lines", name: label(server.name),
      x: [...values.slice(0, 1), ...values], y: [...values.slice(0, 1).map(() => 0), ...values.map((_, j) => (j + 1) / values.length)],
      line: { color: colourOf(hue(i)), width: 2, shape: "hv" },
      hovertemplate: `%{y:.0%} took at most %{x:.3f} s<extra>${label(server.name)}</extra>`,
    };
  });
}

function plots() {
  draw("running", times("running", ".0f"), "seconds", "requests");
  draw("usage", times("kv_usage", ".0%"), "seconds", "share of blocks", { tickformat: ".0%" });
  const share = { tickformat: ".0%", range: [0, 1.02] };
  draw("first", shares("first_token_seconds"), "seconds", "share of requests", share);
  draw("token", shares("seconds_per_token"), "seconds", "share of requests", share);
  draw("request", shares("seconds"), "seconds", "share of requests", share);
}

// ---- figures

function table() {
  figures(["", ...servers.map((server) => server.name), ...(servers.length > 1 ? ["ratio"] : [])], rows);
  for (const server of servers) {
    for (const error of server.errors.slice(0, 5)) id("errors").append(el("li", {}, `${server.name}: ${error}`));
  }
  id("time-note").textContent =
    "Read from the server’s metrics every half second" +
    (servers.length > 1 ? "; each server by its own clock, from its first request on." : ", from the first request on.") +
    (load.rounds > 1 ? " A gap lies between two rounds." : "");
}

header();
table();
plots();
onScheme(plots);
