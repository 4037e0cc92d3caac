// Draws what recipes kept of a text: shares of heads that keep a token, or its fate event by event.

const numbered = (values) => values.map((value, i) => [i, String(value)]);

// Appends the box of a text and of the tip that describes its tokens.
function textBox(box) {
  box.append(
    el("p", { id: "share", role: "status" }),
    el("div", { id: "text", tabIndex: 0, role: "region", ariaLabel: "The text" }),
    el("p", { className: "note" }, "Point at a token, or focus the text and press ← or →, to see its index. ↵ marks a line break."),
    el("div", { id: "tip", role: "status", hidden: true }));
}

// ---- a prompt, shaded by the share of the chosen heads that keep a token

async function kept({ tokens, grids, layers, heads, choices, first, needle }, box) {
  const bits = await Promise.all(choices.map(([, packed]) => packed && unpack(packed)));
  const ran = choices.flatMap(([name, packed], i) => (packed ? [[i, name]] : []));
  const all = (count) => [["all", `all ${count}`], ...numbered([...Array(count).keys()])];
  const [recipe, recipes] = select("recipe", "Recipe", ran, shade);
  const [layer, layerBox] = select("layer", "Layer", ran.length ? all(layers) : [], shade);
  const [head, headBox] = select("head", "KV head", ran.length ? all(heads) : [], shade);
  const toNeedle = el("button", { type: "button", className: "link", hidden: !needle }, "Go to the answer (underlined)");
  box.append(el("div", { className: "controls" }, recipes, layerBox, headBox),
    el("p", { className: "legend" }, "Share of the selected heads that keep a token",
      el("span", { className: "scale" }, "0%", el("span", { id: "scale", ariaHidden: "true" }), "100%"), toNeedle));
  textBox(box);
  fillScale();

  let counts = new Uint32Array(tokens.length), pairs = [];
  const ofHeads = () => `${integer(pairs.length)} head${pairs.length > 1 ? "s" : ""}`;
  const shareOf = ({ from, to }) => counts.subarray(from, to).reduce((sum, count) => sum + count, 0) / pairs.length / (to - from);
  const shown = tokenText((piece) => {
    if (!pairs.length) return "";
    const share = percent(shareOf(piece));
    return piece.to - piece.from > 1 ? `kept by ${share} of ${ofHeads()}, on the mean of its tokens`
      : `kept by ${counts[piece.from]} of ${ofHeads()} (${share})`;
  });
  const drawn = shown.write(tokens, grids);
  const marked = needle ? drawn.filter(({ from, to }) => from < needle[1] && to > needle[0]) : [];
  for (const { span } of marked) span.classList.add("needle");
  toNeedle.addEventListener("click", () => marked[0].span.scrollIntoView({ block: "center" }));

  function shade() {
    const chosen = (node, count) => (node.value === "all" ? [...Array(count).keys()] : [Number(node.value)]);
    const packed = bits[recipe.value];
    pairs = chosen(layer, layers).flatMap((l) => chosen(head, heads).map((h) => l * heads + h));
    counts = new Uint32Array(tokens.length);
    for (const pair of pairs) for (let t = 0; t < tokens.length; t++) counts[t] += bit(packed, pair * tokens.length + t);
    for (const piece of drawn) shadeBy(piece.span, shareOf(piece));
    const total = counts.reduce((sum, count) => sum + count, 0), entries = pairs.length * tokens.length;
    const gone = counts.reduce((sum, count) => sum + (count === 0), 0);
    id("share").textContent = `${percent(total / entries)} kept: ${integer(total)} of ${integer(entries)} entries in ${ofHeads()}; ` +
      `${integer(gone)} of ${integer(tokens.length)} tokens kept by none.`;
    for (const tr of document.querySelectorAll("tr[data-choice]")) tr.ariaCurrent = tr.dataset.choice === recipe.value ? "true" : null;
    shown.refresh();
  }

  if (!ran.length) id("share").textContent = "No recipe ran to its end, so nothing is shaded.";
  else {
    recipe.value = String(first);
    shade();
  }
}

// ---- a generation, event by event

const KEPT = 0, NOW = 1, GONE = 2, FATES = ["kept", "dropped by this event", "dropped before", "not there yet"];

async function events({ runs, layers, heads }, box) {
  const bits = await Promise.all(runs.map((run) => Promise.all(run.events.map((event) => unpack(event.kept)))));
  const count = Math.max(...runs.map((run) => run.events.length));
  const slider = el("input", { type: "range", id: "event", min: "0", step: "1", max: String(Math.max(count - 1, 0)) });
  const label = el("span", { id: "event-label" });
  const [layer, layerBox] = select("layer", "Layer", numbered(layers), update);
  const [head, headBox] = select("head", "KV head", numbered([...Array(heads).keys()]), update);
  const charts = el("div", { id: "charts", hidden: !count || !layers.length });
  const names = runs.map((run) => run.name);
  const choices = radio("run", names, (i) => { chosenRun = i; write(); update(); });
  choices.hidden = runs.length < 2;
  slider.value = slider.max;
  slider.addEventListener("input", update);
  charts.append(el("div", { className: "controls pinned" }, el("label", { className: "control" }, label, slider), layerBox, headBox));
  box.append(charts, choices, el("p", { className: "legend" },
    ...[["kept", "kept"], ["now", "dropped by this event"], ["gone", "dropped before"]].map(([name, text]) =>
      el("span", { className: "scale" }, el("span", { className: `swatch ${name}` }), text))));
  textBox(box);
  const panels = runs.map((run) => {
    const caption = el("figcaption"), cache = el("div"), map = el("div");
    if (run.events.length) charts.append(el("figure", { className: "run" }, caption, cache, map));
    return { caption, cache, map };
  });

  let chosenRun = 0, drawn = [], fate = [];
  const eventOf = (run) => Math.min(Number(slider.value), run.events.length - 1);

  // What has become of each token of the text so far, for the chosen layer and head.
  function fates(i, number) {
    const keeps = (n) => {
      const { length } = runs[i].events[n];
      const start = (Number(layer.value) * heads + Number(head.value)) * length;
      return Array.from({ length }, (_, t) => bit(bits[i][n], start + t));
    };
    const before = number ? keeps(number - 1) : [];
    return keeps(number).map((stays, t) => (stays ? KEPT : t >= before.length || before[t] ? NOW : GONE));
  }

  // A piece of several tokens fares as the first of them that stays, or else as its last.
  function fateOf({ from, to }) {
    const own = fate.slice(from, to);
    return own.includes(KEPT) ? KEPT : own.length < to - from ? FATES.length - 1 : own.at(-1);
  }
  const shown = tokenText((piece) => FATES[fateOf(piece)]);

  function write() {
    const { tokens, prompt } = runs[chosenRun];
    drawn = shown.write(tokens);
    drawn.find(({ to }) => to > prompt)?.span.classList.add("start");
  }

  function update() {
    label.textContent = `Event ${Number(slider.value) + 1} of ${count}`;
    slider.ariaValueText = label.textContent;
    if (!charts.hidden) runs.forEach((run, i) => { if (run.events.length) panel(i); });
    const number = charts.hidden ? -1 : eventOf(runs[chosenRun]);
    fate = number < 0 ? [] : fates(chosenRun, number);
    for (const piece of drawn) {
      const its = fateOf(piece);
      shadeBy(piece.span, its === KEPT ? 1 : 0);
      ["kept", "now", "dropped", "ahead"].forEach((name, i) => piece.span.classList.toggle(name, its === i));
    }
    const many = (what) => integer(fate.filter((each) => each === what).length);
    id("share").textContent = number < 0 ? "Nothing was compressed."
      : `Event ${number + 1}, at ${integer(fate.length)} tokens: ${many(KEPT)} kept, ${many(NOW)} dropped, ${many(GONE)} dropped before.`;
    shown.refresh();
  }

  // Draws one head's cache before the event, entry by entry, and the fates of all tokens at all events.
  function panel(i) {
    const run = runs[i], number = eventOf(run), now = fates(i, number), { caption, cache, map } = panels[i];
    const positions = [...now.keys()].filter((t) => now[t] !== GONE);
    const stays = [...positions.keys()].filter((entry) => now[positions[entry]] === KEPT);
    const told = run.events[number].segments[layer.value]?.[head.value];
    caption.replaceChildren(el("code", {}, run.name),
      `at ${integer(now.length)} tokens: keeps ${integer(stays.length)} of ${integer(positions.length)} entries` +
      (told ? ` in ${told.ends.length} segments` : ""));
    chart(cache, entries(run, positions, stays, told, cache.clientWidth));
    const rows = run.events.map((_, n) => fates(i, n));
    chart(map, {
      height: `${Math.max(120, Math.min(360, 60 + 22 * rows.length))}px`,
      traces: [{
        type: "heatmap", scale: "fate", z: rows, zmin: -0.5, zmax: 2.5, showscale: false, y: rows.map((_, n) => n + 1),
        text: rows.map((row) => row.map((each) => FATES[each])), hovertemplate: "event %{y}, token %{x}: %{text}<extra></extra>",
      }],
      layout: {
        shapes: [{ type: "rect", stroke: "--ink", xref: "paper", x0: 0, x1: 1, y0: number + 0.5, y1: number + 1.5, line: { width: 2 } }],
        xaxis: { title: "token of the text", showgrid: false, zeroline: false },
        yaxis: { title: "event", autorange: "reversed", showgrid: false, tickformat: "d", dtick: Math.ceil(rows.length / 10) },
      },
    });
  }

  write();
  update();
}

// Returns a text for plotly, which reads labels as a small HTML of its own.
const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// Returns the chart of a head's entries: ticks for those that stay and, of methods with segments, bands, mass and quotas.
function entries(run, positions, stays, told, width) {
  const token = (entry) => `token ${positions[entry]} ${escaped(JSON.stringify(run.tokens[positions[entry]]))}`;
  const bare = { title: "", showgrid: false, zeroline: false, showticklabels: false, fixedrange: true, range: [-1, 1] };
  const traces = [{
    name: "kept", mode: "markers", yaxis: "y2", series: "--c5", x: stays, y: stays.map(() => 0),
    marker: { symbol: "line-ns-open", size: 16, line: { width: 1.5 } }, hovertext: stays.map((entry) => `kept: ${token(entry)}`),
  }];
  const shapes = [];
  if (told) {
    const starts = [0, ...told.ends.slice(0, -1)], room = width / positions.length;
    const within = (values, i) => values.filter((entry) => entry >= starts[i] && entry < told.ends[i]);
    starts.forEach((start, i) => {
      const band = { xref: "x", yref: "paper", x0: start - 0.5, y0: 0, y1: 1, layer: "below" };
      if (i % 2) shapes.push({ ...band, type: "rect", x1: told.ends[i] - 0.5, opacity: 0.14, fill: "--muted" });
      if (i) shapes.push({ ...band, type: "line", x1: start - 0.5, stroke: "--muted", line: { dash: "dot" } });
    });
    traces.push({
      name: "mass", mode: "lines", x: [...told.mass.keys()], y: told.mass, line: { width: 1.5 },
      hovertext: told.mass.map((m, entry) => `mass ${m.toPrecision(3)}<br>${token(entry)}`),
    }, {
      mode: "text", yaxis: "y3", x: starts.map((start, i) => (start + told.ends[i] - 1) / 2), y: starts.map(() => 0),
      text: told.quotas.map((quota, i) => ((told.ends[i] - starts[i]) * room > 9 * String(quota).length ? String(quota) : "")),
      hovertext: starts.map((start, i) => `segment ${i + 1}: ${told.ends[i] - start} entries<br>quota ${told.quotas[i]}, kept ${within(stays, i).length}`),
    });
  }
  const positive = (told?.mass ?? []).filter((m) => m > 0);
  const decades = Math.max(...positive) > 100 * Math.min(...positive);
  return {
    traces, height: told ? "290px" : "110px",
    layout: {
      shapes, xaxis: { title: "entry of the cache", range: [-1, positions.length], showgrid: !told, zeroline: false, anchor: "y2" },
      yaxis: { title: "mass", domain: [0.14, 0.9], type: "log", visible: Boolean(told), tickformat: "~g", dtick: decades ? 1 : "D2" },
      yaxis2: { ...bare, domain: told ? [0, 0.12] : [0, 1] }, yaxis3: { ...bare, domain: [0.91, 1] },
    },
  };
}

await show();
