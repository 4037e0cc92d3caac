const { trace, drawn, layers } = data;
const { runs } = trace;

const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "–");
const decimal = (digits) => (value) => (known(value) ? value.toFixed(digits) : "–");
const colour = (run) => css(run ? "--c1" : "--c0");

// ---- what was kept

const heads = Math.max(...runs.map((run) => run.kv_heads), 0);
const events = Math.max(...runs.map((run) => run.events.length), 0);
const bits = await Promise.all(drawn.map((run) => Promise.all(run.events.map((event) => unpack(event.kept)))));

// Whether a head keeps each token of the text so far.
function kept(run, event, { layer, head }) {
  const { length } = runs[run].events[event];
  const first = (layer * heads + head) * length;
  const packed = bits[run][event];
  return Uint8Array.from({ length }, (_, t) => bit(packed, first + t));
}

const KEPT = 0, NOW = 1, GONE = 2;

// What has become of each token of the text by this event.
function fates(run, event, choice) {
  const now = kept(run, event, choice);
  const before = event ? kept(run, event - 1, choice) : [];
  return now.map((stays, t) => (stays ? KEPT : t >= before.length || before[t] ? NOW : GONE));
}

const chosen = () => ({ layer: Number(id("layer").value), head: Number(id("head").value) });
const chosenEvent = (run) => Math.min(Number(id("event").value), runs[run].events.length - 1);

// ---- header and figures

function header() {
  const [first] = runs;
  title(trace.model,
    `${integer(first.prompt_tokens)} tokens of prompt, ${integer(first.tokens - first.prompt_tokens)} after it, ` +
    `under ${first.recipe}` +
    (runs.length < 2 ? "." : trace.forced ? `; then the same tokens under ${runs[1].recipe}.` : `; and the same prompt under ${runs[1].recipe}.`));
}

const MEASURES = [
  ["Regions wiped out", (run) => run.mean.wipeout, percent],
  ["IoU with the event before", (run) => run.mean.iou, decimal(3)],
  ...["early", "middle", "late"].map((stage) => [`IoU, ${stage} layers`, (run) => run.by_depth.iou?.[stage], decimal(3)]),
  ["Kept of the middle third", (run) => run.mean.middle, percent],
  ["Longest gap, tokens", (run) => run.mean.longest_gap, decimal(1)],
  ["Repeated 4-grams", (run, i) => (trace.forced && i ? null : run.repetition), percent],
  ["Segments per head", (run) => run.segments?.count, decimal(1)],
  ["Entries per segment", (run) => run.segments?.length, decimal(1)],
  ["Tokens after the prompt", (run) => run.tokens - run.prompt_tokens, integer],
  ["Tokens per second", (run) => run.tokens_per_second, decimal(1)],
];

function table() {
  const measured = MEASURES.map(([name, value, show]) => [name, runs.map(value), show]).filter(([, values]) => values.some(known));
  figures(["", ...runs.map((run) => run.recipe)], measured.map(([name, values, show]) => [name, ...values.map(show)]));
  id("rows-note").textContent =
    `Means over events, layers and KV heads. A region is ${integer(runs[0].region)} tokens; it is wiped out where a head ` +
    "keeps none of them. IoU is over the positions that existed at the event before.";
}

// ---- plots

const CURVES = [
  ["wipeout", "share of regions", ".0%", ".1%"], ["iou", "IoU", "", ".3f", { range: [0, 1.05] }], ["middle", "share of the third", ".0%", ".1%"],
  ["longest_gap", "tokens", "", ".1f"],
];

function curves() {
  for (const [name, unit, tickformat, shown, range = { rangemode: "tozero" }] of CURVES) {
    const traces = runs.map((run, i) => {
      const rows = run.events.filter((event) => known(event[name]));
      return {
        type: "scatter", mode: "lines+markers", name: label(run.recipe), x: rows.map((event) => event.length), y: rows.map((event) => event[name]),
        line: { color: colour(i), width: 2, dash: i ? "dash" : "solid" }, marker: { color: colour(i), size: 6, symbol: i ? "square" : "circle" },
        hovertemplate: `at %{x} tokens: %{y:${shown}}<extra>${label(run.recipe)}</extra>`,
      };
    });
    if (traces.every((each) => !each.x.length)) id(name).closest("figure").hidden = true;
    else {
      const zerolinecolor = css("--line");
      chart(id(name), traces, {
        xaxis: axis("tokens of text", { zerolinecolor }),
        yaxis: axis(unit, { zerolinecolor, tickformat, ...range }),
      });
    }
  }
}

// One head's cache before the event: bands for segments, the mass curve, quotas, and ticks for what stays.
function cache(run, box, caption) {
  const event = chosenEvent(run);
  const choice = chosen();
  const fate = fates(run, event, choice);
  const positions = [...fate.keys()].filter((t) => fate[t] !== GONE);
  const stays = [...positions.keys()].filter((entry) => fate[positions[entry]] === KEPT);
  const told = drawn[run].events[event].segments[choice.layer]?.[choice.head];
  const row = runs[run].events[event];
  caption.textContent =
    `at ${integer(row.length)} tokens: keeps ${integer(stays.length)} of ${integer(positions.length)} entries` +
    (told ? ` in ${told.ends.length} segments` : "");

  const token = (t) => `token ${t} ${label(JSON.stringify(drawn[run].tokens[t]))}`;
  const traces = [{
    name: "kept", type: "scatter", mode: "markers", yaxis: "y2", x: stays, y: stays.map(() => 0),
    marker: { symbol: "line-ns-open", size: 16, color: css("--c5"), line: { width: 1.5 } },
    hovertext: stays.map((entry) => `kept: ${token(positions[entry])}`), hoverinfo: "text",
  }];
  const shapes = [];
  if (told) {
    const starts = [0, ...told.ends.slice(0, -1)];
    const inside = starts.map((start, i) => stays.filter((entry) => entry >= start && entry < told.ends[i]).length);
    const mass = starts.map((start, i) => told.mass.slice(start, told.ends[i]).reduce((sum, m) => sum + m, 0));
    starts.forEach((start, i) => {
      if (i % 2) shapes.push({ type: "rect", xref: "x", yref: "paper", x0: start - 0.5, x1: told.ends[i] - 0.5, y0: 0, y1: 1, fillcolor: css("--muted"), opacity: 0.14, line: { width: 0 }, layer: "below" });
      if (i) shapes.push({ type: "line", xref: "x", yref: "paper", x0: start - 0.5, x1: start - 0.5, y0: 0, y1: 1, line: { color: css("--muted"), width: 1, dash: "dot" }, layer: "below" });
    });
    const room = box.clientWidth / positions.length;
    traces.push({
      name: "mass", type: "scatter", mode: "lines", x: [...told.mass.keys()], y: told.mass, line: { color: css("--c0"), width: 1.5 },
      hovertext: told.mass.map((m, entry) => `mass ${m.toPrecision(3)}<br>${token(positions[entry])}`), hoverinfo: "text",
    }, {
      type: "scatter", mode: "text", yaxis: "y3", textposition: "middle center",
      x: starts.map((start, i) => (start + told.ends[i] - 1) / 2), y: starts.map(() => 0),
      text: told.quotas.map((quota, i) => ((told.ends[i] - starts[i]) * room > 9 * String(quota).length ? String(quota) : "")),
      textfont: { size: 12, color: css("--ink") },
      hovertext: starts.map((start, i) =>
        `segment ${i + 1}: ${told.ends[i] - start} entries, mass ${mass[i].toPrecision(3)}<br>quota ${told.quotas[i]}, kept ${inside[i]}`),
      hoverinfo: "text",
    });
  }
  const least = Math.min(...(told?.mass ?? []).filter((m) => m > 0));
  const wide = told && Math.max(...told.mass) > 100 * least;
  box.style.height = told ? "290px" : "110px";
  const bare = { showgrid: false, zeroline: false, showticklabels: false, fixedrange: true, range: [-1, 1] };
  chart(box, traces, {
    shapes,
    xaxis: axis("entry of the cache", { range: [-1, positions.length], showgrid: !told, zeroline: false, anchor: "y2" }),
    yaxis: axis("mass", { domain: [0.14, 0.9], type: "log", visible: Boolean(told), tickformat: "~g", dtick: wide ? 1 : "D2" }),
    yaxis2: { ...bare, domain: told ? [0, 0.12] : [0, 1] },
    yaxis3: { ...bare, domain: [0.91, 1] },
  });
}

function map(run, box) {
  const choice = chosen();
  const rows = runs[run].events.map((_, event) => Array.from(fates(run, event, choice)));
  const at = chosenEvent(run);
  const tones = [css("--keep"), css("--c3"), css("--line")];
  box.style.height = `${Math.max(120, Math.min(360, 60 + 22 * rows.length))}px`;
  chart(box, [{
    type: "heatmap", z: rows, zmin: -0.5, zmax: 2.5, showscale: false, xgap: 0, ygap: 1,
    colorscale: tones.flatMap((tone, i) => [[i / 3, tone], [(i + 1) / 3, tone]]),
    text: rows.map((row) => row.map((fate) => WORDS[fate])),
    hovertemplate: "event %{y}, token %{x}: %{text}<extra></extra>", y: rows.map((_, event) => event + 1),
  }], {
    shapes: [{ type: "rect", xref: "paper", yref: "y", x0: 0, x1: 1, y0: at + 0.5, y1: at + 1.5, line: { color: css("--ink"), width: 2 } }],
    xaxis: axis("token of the text", { showgrid: false, zeroline: false }),
    yaxis: axis("event", { autorange: "reversed", showgrid: false, tickformat: "d", dtick: Math.ceil(rows.length / 10) }),
  });
}

// ---- text

let pieceList = [];
let fate = [];
const WORDS = ["kept", "dropped by this event", "dropped before", "not there yet"];
// A piece of several tokens fares as the first of them that stays, or else as its last.
const fateOf = ({ from, to }) => {
  const own = fate.slice(from, to);
  return own.includes(KEPT) ? KEPT : own.length < to - from ? undefined : own.at(-1);
};
const shownText = tokenText((piece) => WORDS[fateOf(piece) ?? 3]);
const chosenRun = () => Number(document.querySelector("#run input:checked")?.value ?? 0);

function write() {
  pieceList = shownText.write(drawn[chosenRun()].tokens);
  pieceList.find(({ to }) => to > runs[chosenRun()].prompt_tokens)?.span.classList.add("start");
}

function shade() {
  const run = chosenRun();
  const event = chosenEvent(run);
  fate = event < 0 ? [] : Array.from(fates(run, event, chosen()));
  for (const piece of pieceList) {
    const its = fateOf(piece);
    piece.span.style.setProperty("--share", its === KEPT ? "1" : "0");
    piece.span.classList.toggle("now", its === NOW);
    piece.span.classList.toggle("dropped", its === GONE);
    piece.span.classList.toggle("ahead", its === undefined);
  }
  const count = (what) => integer(fate.filter((each) => each === what).length);
  id("share").textContent =
    event < 0 ? "Nothing was compressed."
      : `Event ${event + 1}, at ${integer(fate.length)} tokens: ${count(KEPT)} kept, ${count(NOW)} dropped, ${count(GONE)} dropped before.`;
  shownText.refresh();
}

function text() {
  runs.forEach((run, i) => {
    const input = el("input", { type: "radio", name: "run", value: i, checked: i === 0 });
    input.addEventListener("change", () => { write(); shade(); });
    id("run").append(el("label", {}, input, run.recipe));
  });
  id("run").hidden = runs.length < 2;
  write();
}

// ---- events

const panels = [];

function update() {
  const slider = id("event");
  id("event-label").textContent = `Event ${Number(slider.value) + 1} of ${events}`;
  slider.ariaValueText = id("event-label").textContent;
  for (const { run, cacheBox, caption, mapBox } of panels) {
    cache(run, cacheBox, caption);
    map(run, mapBox);
  }
  shade();
}

function scrub() {
  if (!events || !layers.length) {
    for (const name of ["events", "maps-section", "curves"]) id(name).hidden = true;
    shade();
    return;
  }
  layers.forEach((layer, i) => id("layer").append(el("option", { value: i }, String(layer))));
  for (let head = 0; head < heads; head++) id("head").append(el("option", { value: head }, String(head)));
  runs.forEach((run, i) => {
    if (!run.events.length) return;
    const caption = el("span");
    const cacheBox = el("div"), mapBox = el("div");
    id("caches").append(el("figure", { className: "run" }, el("figcaption", {}, el("code", {}, run.recipe), caption), cacheBox));
    id("maps").append(el("figure", { className: "run" }, el("figcaption", {}, el("code", {}, run.recipe)), mapBox));
    panels.push({ run: i, cacheBox, caption, mapBox });
  });
  const telling = drawn.some((run) => run.events.some((event) => event.segments.some((told) => told.length)));
  id("caches-note").textContent =
    "One head’s cache before the event, entry by entry; ticks are the entries that stay." +
    (telling ? " Bands are segments, the curve is the mass of every entry, and numbers are the segments’ quotas." : "") +
    (drawn.length > 1 || !telling ? " A recipe without segments has its ticks alone." : "");
  id("event").max = String(events - 1);
  id("event").value = String(events - 1);
  id("event").addEventListener("input", update);
  for (const name of ["layer", "head"]) id(name).addEventListener("change", update);
  update();
}

function paint() {
  curves();
  if (panels.length) update();
}

header();
if (runs.length > 1) legends(runs.map((run, i) => [run.recipe, i, i > 0]));
table();
text();
scrub();
curves();
onScheme(paint);
