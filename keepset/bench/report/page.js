// What all pages share; a page's own script follows in the same module.
// Whatever comes from `data` goes into the document as text nodes or attributes, never as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const id = (name) => document.getElementById(name);

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function title(model, lead) {
  document.title += `: ${model}`;
  id("model").textContent = model;
  id("lead").textContent = lead;
}

const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

function figures(titles, lines) {
  document.querySelector("#rows thead").append(el("tr", {}, ...titles.map((each) => el("th", { scope: "col" }, each))));
  document.querySelector("#rows tbody").append(...lines.map(([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)))));
}

// ---- numbers

const known = (value) => Number.isFinite(value);
// Numbers that JSON cannot write arrive as "NaN" and "Infinity".
const number = (value) => (typeof value === "number" || typeof value === "string" ? Number(value) : null);
const shown = (format) => (value) => {
  const x = number(value);
  return x === null ? "–" : Number.isFinite(x) ? format(x).replace("-", "−") : String(x);
};
const integer = shown((x) => x.toLocaleString("en-US"));
const bytes = shown((x) => {
  const power = x < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(x) / 10));
  return `${(x / 1024 ** power).toFixed(power ? 2 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
});

// ---- plots

// Plotly reads labels as a small HTML of its own.
const label = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const wrapped = (text) => (text.match(/.{1,44}/gsu) ?? []).map(label).join("<br>");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") });
const axis = (text, more) => ({
  gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--muted"), automargin: true,
  ...(text ? { title: { text, font: font() } } : {}), ...more,
});

function chart(box, traces, more) {
  const layout = {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", showlegend: false, hovermode: "closest",
    font: font(),
    margin: { l: 8, r: 12, t: 12, b: 8 },
    // A finger scrolls the page; a mouse may zoom.
    dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
    hoverlabel: { bgcolor: css("--page"), bordercolor: css("--muted"), align: "left", font: font() },
    ...more,
  };
  Plotly.react(box, traces, layout, { displayModeBar: false, responsive: true });
}

const onScheme = (draw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// ---- methods: one colour and symbol each

const SYMBOLS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["triangle-down", "▼"]];
const COLOURS = 8;
const colourOf = (i) => css(`--c${i % COLOURS}`);
const symbolOf = (i) => SYMBOLS[i % SYMBOLS.length][0];

function mark(i) {
  const node = el("span", { className: "mark", ariaHidden: "true" }, SYMBOLS[i % SYMBOLS.length][1]);
  node.style.color = `var(--c${i % COLOURS})`;
  return node;
}

// A button for each method takes it out of the plots and back in.
function toggles(methods, hidden, draw) {
  id("methods").append(...methods.map((method, i) => {
    const button = el("button", { type: "button", ariaPressed: "true", title: "Show or hide" }, mark(i), method);
    button.addEventListener("click", () => {
      if (!hidden.delete(method)) hidden.add(method);
      button.ariaPressed = String(!hidden.has(method));
      draw();
    });
    return button;
  }));
}

// One of several, by radio buttons.
function choice(name, options, chosen, choose) {
  for (const [key, text] of options) {
    const input = el("input", { type: "radio", name, value: key, checked: key === chosen });
    input.addEventListener("change", () => choose(key));
    id(name).append(el("label", {}, input, text));
  }
}

// ---- tables that sort by a click on a column's name

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

function compare(a, b, direction) {
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return direction * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
}

const recipeParts = (recipe) => recipe.split(/(?<=[(,])/).flatMap((part) => [part, el("wbr")]);

// Columns are [name and unit, value to sort by, what a cell shows, the reference's value, classes]; lines are
// { row, tr }, and those whose row failed stay last.
function sortable(table, columns, lines, failed) {
  const body = table.tBodies[table.tBodies.length - 1];
  body.replaceChildren(...lines.map(({ tr }) => tr));
  const head = el("tr");
  for (const [name, value, , , classes = ""] of columns) {
    const [title, unit] = name.split("\n");
    const button = el("button", { type: "button" }, title, ...(unit ? [el("br"), el("small", {}, unit)] : []));
    const th = el("th", { scope: "col", className: classes, ariaSort: "none" }, button);
    button.addEventListener("click", () => {
      const ascending = th.ariaSort !== "ascending";
      for (const other of head.children) other.ariaSort = "none";
      th.ariaSort = ascending ? "ascending" : "descending";
      lines.sort((a, b) =>
        failed(a.row) - failed(b.row) || compare(value(a.row), value(b.row), ascending ? 1 : -1));
      body.append(...lines.map(({ tr }) => tr));
    });
    head.append(th);
  }
  table.tHead.replaceChildren(head);
}

// ---- what was kept

const unpack = (packed) => Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
const bit = (bytes, i) => (bytes[i >> 3] >> (7 - (i & 7))) & 1;

// A text whose tokens, under the pointer or reached with the arrow keys, are described in a tip.
function tokenText(describe) {
  const box = id("text"), tip = id("tip");
  let tokens = [], spans = [], current = -1;

  function write(texts) {
    tokens = texts;
    spans = tokens.map((text) => el("span", { className: /[\n\r]/.test(text) ? "break" : "" }, ...(text ? [text] : [])));
    spans.forEach((span, t) => { span.dataset.token = t; });
    current = -1;
    box.replaceChildren(...spans);
    return spans;
  }

  function show(t) {
    spans[current]?.classList.remove("current");
    current = t;
    tip.hidden = t < 0;
    if (t < 0) return;
    spans[t].classList.add("current");
    tip.replaceChildren(`token ${t} `, el("code", {}, JSON.stringify(tokens[t])), el("br"), describe(t));
    const place = spans[t].getClientRects()[0] ?? spans[t].getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const above = place.top > tip.offsetHeight + 12;
    tip.style.left = `${scrollX + Math.max(8, Math.min(place.left, width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${scrollY + (above ? place.top - tip.offsetHeight - 6 : place.bottom + 6)}px`;
  }

  const refresh = () => show(current);
  box.addEventListener("pointerover", (event) => show(Number(event.target.dataset.token ?? -1)));
  // A finger leaves as soon as it has tapped.
  box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") show(-1); });
  box.addEventListener("scroll", refresh);
  box.addEventListener("blur", () => show(-1));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") show(-1);
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(spans.length - 1, current + step));
    spans[next].scrollIntoView({ block: "nearest" });
    show(next);
  });
  return { write, refresh };
}
