// Draws a page from its description: a list of sections, each of one of the kinds in DRAW.

// ---- colours, which follow the browser's light or dark scheme

const COLOURS = 8;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// A series is a number or the name of a colour. Beyond the style's colours, hues by the golden angle are all different.
const colourOf = (series) =>
  typeof series === "string" ? css(series)
    : series < COLOURS ? css(`--c${series}`) : `hsl(${Math.round(137.5 * series) % 360} 60% ${css("--lightness")})`;

// ---- charts, drawn by plotly; the labels that it gets are escaped already

const plotly = new TextDecoder().decode(await unpack(id("plotly").textContent));
document.head.append(el("script", { textContent: plotly }));

const hidden = new Set();
const charts = new Map();

const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") });
const axis = ({ title, ...more } = {}) => ({
  gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true,
  title: { text: title, font: font(), standoff: 8 }, ...more,
});

function styled({ series = 0, group, ...trace }) {
  const color = colourOf(series);
  return {
    type: "scatter", cliponaxis: false, hoverinfo: trace.hovertext ? "text" : undefined,
    ...trace, visible: !hidden.has(group),
    line: { color, width: 2, ...trace.line },
    marker: { color, size: 8, ...trace.marker },
    error_y: trace.error_y && { type: "data", symmetric: false, thickness: 1, width: 3, color, ...trace.error_y },
  };
}

function chart(box, plot) {
  charts.set(box, plot);
  const { xaxis, yaxis, shapes = [], ...more } = plot.layout;
  const traces = plot.traces.map(styled);
  const layout = {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, hovermode: "closest",
    font: font(), margin: { l: 8, r: 12, t: 12, b: 8 },
    // A finger scrolls the page; a mouse may zoom.
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
    hoverlabel: { bgcolor: css("--page"), bordercolor: css("--muted"), align: "left", font: font() },
    xaxis: axis(xaxis), yaxis: axis(yaxis), ...more,
    shapes: shapes.map(({ stroke, ...shape }) => ({ ...shape, line: { width: 1, color: css(stroke), ...shape.line } })),
  };
  if (plot.height) box.style.height = plot.height;
  box.role = "img";
  box.ariaLabel = inWords(traces, layout);
  Plotly.react(box, traces, layout, { displayModeBar: false, responsive: true });
}

// Returns a chart as words for readers who do not see it: its axes, and some points of each series.
function inWords(traces, { xaxis, yaxis }) {
  const short = (value) => (typeof value === "number" ? Number(value.toPrecision(3)).toLocaleString("en-US") : String(value));
  const lines = traces.filter((trace) => trace.name && trace.visible !== false && trace.x?.length).map(({ name, x, y }) => {
    const points = [...x.keys()].filter((i) => Number.isFinite(y[i]));
    const some = points.length > 12 ? [points[0], points[points.length >> 1], points.at(-1)] : points;
    return `${name}: ${some.map((i) => `${short(y[i])} at ${short(x[i])}`).join(", ")}`;
  });
  return [`Chart of ${yaxis.title.text} by ${xaxis.title.text}.`, ...lines].join(" ");
}

function redraw() {
  for (const [box, plot] of charts) {
    if (box.isConnected) chart(box, plot);
    else charts.delete(box);
  }
}

// Plotly's symbols, drawn: not every font has characters that look like them.
const MARKS = {
  circle: "M5.5 0A5.5 5.5 0 1 1-5.5 0A5.5 5.5 0 1 1 5.5 0Z", square: "M-5-5H5V5H-5Z", diamond: "M0-7L7 0L0 7L-7 0Z",
  "triangle-up": "M0-6L6.5 5H-6.5Z", "triangle-down": "M0 6L-6.5-5H6.5Z", cross: "M-2-6.5H2V-2H6.5V2H2V6.5H-2V2H-6.5V-2H-2Z",
  x: "M-3.2-6.1L0-2.9L3.2-6.1L6.1-3.2L2.9 0L6.1 3.2L3.2 6.1L0 2.9L-3.2 6.1L-6.1 3.2L-2.9 0L-6.1-3.2Z",
  star: "M0-7.5L1.8-2.4L7.1-2.3L2.9.9L4.4 6.1L0 3L-4.4 6.1L-2.9.9L-7.1-2.3L-1.8-2.4Z",
};

function glyph(symbol, series) {
  const node = el("span", { className: "mark", ariaHidden: "true" });
  node.style.color = typeof series === "string" ? `var(${series})` : colourOf(series);
  const [svg, path] = ["svg", "path"].map((name) => document.createElementNS("http://www.w3.org/2000/svg", name));
  svg.setAttribute("viewBox", "-8 -8 16 16");
  path.setAttribute("d", MARKS[symbol.replace("-open", "")]);
  if (symbol.endsWith("-open")) path.setAttribute("class", "open");
  svg.append(path);
  node.append(svg);
  return node;
}

// One legend for all plots of a section: a button takes its series out of the plots and back in.
function legend(entries, box) {
  const group = el("div", { className: "methods", role: "group", ariaLabel: "Series shown in the plots" });
  for (const [name, series, mark] of entries) {
    const button = el("button", { type: "button", ariaPressed: String(!hidden.has(name)), title: "Show or hide" }, glyph(mark, series), name);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.ariaPressed = String(!hidden.has(name));
      redraw();
    });
    group.append(button);
  }
  if (entries.length) box.append(group);
}

function plots({ plots: all, legend: entries = [] }, box) {
  legend(entries, box);
  for (const plot of all) {
    const place = el("figure", { id: plot.id, className: "plot" });
    box.append(place);
    if (plot.traces.some((trace) => trace.x.length)) chart(place, plot);
    else place.replaceChildren(el("p", { className: "note" }, "Nothing was measured."));
  }
}

// ---- tables that sort by a click on a column's name; lines that failed stay last

const missing = (value) => value === null || value === undefined || value === "NaN";

function compare(a, b, direction) {
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return direction * (typeof a === "string" && typeof b === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

// A recipe may break after a bracket or a comma only.
const recipeParts = (recipe) => recipe.split(/(?<=[(,])/).flatMap((part) => [part, el("wbr")]);

function row({ name, mark, cells, error, reference, go }, columns) {
  const code = go === undefined ? el("code", {}, ...recipeParts(name))
    : el("button", { type: "button", className: "link", title: "Show what it kept" }, ...recipeParts(name));
  if (go !== undefined) code.addEventListener("click", () => choose("recipe", go));
  const th = el("th", { scope: "row", className: "recipe" }, el("div", {}, ...(mark ? [glyph(...mark)] : []), code));
  const tr = el("tr", { className: reference ? "reference" : "" }, th);
  if (go !== undefined) tr.dataset.choice = go;
  const why = error && el("div", { className: "failed" }, error);
  if (error && !cells.length) tr.append(el("td", { colSpan: columns.length, className: "text" }, why));
  else if (error) th.append(why);
  const pinned = [...cells.keys()].filter((i) => columns[i].pinned && cells[i][0]);
  if (pinned.length) {
    th.append(el("dl", { className: "under" }, ...pinned.map((i) => el("div", {}, el("dt", {}, columns[i].title), el("dd", {}, cells[i][0])))));
  }
  cells.forEach(([text], i) => {
    const classes = [columns[i].text && "text", columns[i].pinned && "folded"].filter(Boolean).join(" ");
    tr.append(el("td", { className: classes }, el("span", { title: columns[i].text ? text : "" }, text)));
  });
  return tr;
}

function table({ id: name, columns, lines, head = "" }, box) {
  const made = lines.map((line) => ({ line, tr: row(line, columns) }));
  const body = el("tbody"), header = el("tr");
  const keys = [(line) => line.name, ...columns.map((_, i) => (line) => line.cells[i]?.[1])];
  [{ title: head }, ...columns].forEach(({ title, unit, text, pinned }, i) => {
    const button = el("button", { type: "button" }, title, ...(unit ? [el("br"), el("small", {}, unit)] : []));
    const th = el("th", { scope: "col", className: i ? [text && "text", pinned && "folded"].filter(Boolean).join(" ") : "recipe", ariaSort: "none" }, button);
    button.addEventListener("click", () => {
      const direction = th.ariaSort === "ascending" ? -1 : 1;
      for (const other of header.children) other.ariaSort = "none";
      th.ariaSort = direction > 0 ? "ascending" : "descending";
      const last = ({ cells, error }) => Boolean(error && !cells.length);
      made.sort(({ line: a }, { line: b }) =>
        Boolean(b.reference) - Boolean(a.reference) || last(a) - last(b) || compare(keys[i](a), keys[i](b), direction));
      body.append(...made.map(({ tr }) => tr));
    });
    header.append(th);
  });
  body.append(...made.map(({ tr }) => tr));
  const wide = el("p", { className: "note", hidden: true }, "← The table scrolls sideways. →");
  const scroll = el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: "Table" },
    el("table", { id: name ?? "" }, el("thead", {}, header), body));
  box.append(wide, scroll);
  widths.observe(scroll);
}

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth + 1;
});

// Small tables side by side whose cells are the darker the higher their share.
function maps({ maps: all }, box) {
  const grid = el("div", { className: "maps" });
  for (const { title, head, lines } of all) {
    const line = (tag, scope, [name, ...cells]) => el("tr", {}, el("th", { scope }, name), ...cells.map((cell) => {
      if (tag === "th") return el("th", { scope }, cell);
      const td = el("td", { title: cell[2] }, cell[0]);
      if (cell[1] !== null) td.style.setProperty("--share", cell[1]);
      return td;
    }));
    grid.append(el("figure", {}, el("figcaption", {}, el("code", {}, ...recipeParts(title))),
      el("table", {}, el("thead", {}, line("th", "col", head)), el("tbody", {}, ...lines.map((each) => line("td", "row", each))))));
  }
  box.append(grid);
}

// ---- choices: sections of which one set is shown at a time

function select(name, label, options, change) {
  const node = el("select", { id: name }, ...options.map(([value, text]) => el("option", { value }, text)));
  node.disabled = !options.length;
  node.addEventListener("change", change);
  return [node, el("label", { className: "control" }, `${label} `, node)];
}

function choose(name, value) {
  id(name).value = String(value);
  id(name).dispatchEvent(new Event("change"));
  id(name).closest("section").scrollIntoView();
}

function radio(name, options, change) {
  return el("fieldset", { className: "choice", id: name }, ...options.map((text, i) => {
    const input = el("input", { type: "radio", name, value: i, checked: i === 0 });
    input.addEventListener("change", () => change(i));
    return el("label", {}, input, text);
  }));
}

function choice({ id: name, label, options, radio: buttons }, box) {
  const inside = el("div");
  const names = options.map((option) => option.name);
  const show = (i) => {
    inside.replaceChildren();
    for (const section of options[i].sections) draw(section, inside);
  };
  if (buttons) box.append(radio(name, names, show));
  else {
    const [node, control] = select(name, label, names.map((text, i) => [i, text]), () => show(Number(node.value)));
    box.append(el("div", { className: "controls" }, control));
  }
  box.append(inside);
  if (options.length) show(0);
}

// ---- the page

const DRAW = { table, plots, maps, choice, kept };
let sections = 0;

// Draws a section into a box; one with a title is a section of the document.
function draw(section, box) {
  let place = box;
  if (section.title) {
    const heading = el("h2", { id: `section-${sections++}` }, section.title);
    place = el("section", {}, heading);
    place.setAttribute("aria-labelledby", heading.id);
    box.append(place);
  }
  const done = DRAW[section.kind](section, place);
  if (section.note) place.append(el("p", { className: "note" }, section.note));
  return done;
}

const fact = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

async function show() {
  document.title += `: ${data.model}`;
  id("model").textContent = data.model;
  id("conclusion").textContent = data.conclusion;
  id("lead").textContent = data.lead;
  id("facts").append(...data.facts.map(fact));
  for (const section of data.sections) await draw(section, id("sections"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  id("origin").append(...data.origin.map(fact));
}
