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
  const { conclusion, origin } = JSON.parse(id("about").textContent);
  id("conclusion").textContent = conclusion;
  id("lead").textContent = lead;
  for (const [name, value] of Object.entries(origin)) id("origin").append(fact(name, value));
  id("json").addEventListener("toggle", () => {
    const short = (_, value) => (typeof value === "string" && value.length > 400 ? `${value.slice(0, 60)}…` : value);
    id("json").querySelector("pre").textContent = JSON.stringify(data, short, 1);
  }, { once: true });
}

const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

function figures(titles, lines) {
  document.querySelector("#rows thead").append(el("tr", {}, ...titles.map((each) => el("th", { scope: "col" }, each))));
  document.querySelector("#rows tbody").append(...lines.map(([name, ...cells]) =>
    el("tr", {}, el("th", { scope: "row" }, ...recipeParts(name)), ...cells.map((cell) => el("td", {}, cell)))));
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
const bytes = shown((x) => (x < 1e4 ? `${x} B` : `${(x / 1e6).toFixed(x < 1e6 ? 2 : 1)} MB`));

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

// What the page was given as base64 of gzip.
async function unpack(packed) {
  const zipped = new Blob([Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))]);
  return new Uint8Array(await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

const bit = (bytes, i) => (bytes[i >> 3] >> (7 - (i & 7))) & 1;

// What is drawn of a text: its tokens, or several together where one character of a reader's is more than one of them.
// A token that only goes on with the one before it is null.
function pieces(tokens) {
  const ends = new Set([0]);
  for (const { index, segment } of new Intl.Segmenter().segment(tokens.join(""))) ends.add(index + segment.length);
  const found = [];
  let at = 0;
  tokens.forEach((text, t) => {
    const last = found.at(-1);
    if (last && (text === null || !ends.has(at))) Object.assign(last, { to: t + 1, text: last.text + (text ?? "") });
    else found.push({ from: t, to: t + 1, text: text ?? "" });
    at += text?.length ?? 0;
  });
  return found;
}

// A text whose pieces, under the pointer or reached with the arrow keys, are described in a tip.
function tokenText(describe) {
  const box = id("text"), tip = id("tip");
  let drawn = [], current = -1;

  // Returns the pieces, each with its span.
  function write(tokens) {
    drawn = pieces(tokens);
    drawn.forEach((piece, i) => {
      const { text } = piece;
      piece.span = el("span", { className: /[\n\r]/.test(text) ? "break" : "" }, ...(text ? [text] : []));
      piece.span.dataset.piece = i;
    });
    current = -1;
    box.replaceChildren(...drawn.map(({ span }) => span));
    return drawn;
  }

  function show(i) {
    drawn[current]?.span.classList.remove("current");
    current = i;
    tip.hidden = i < 0;
    if (i < 0) return;
    const { span, from, to, text } = drawn[i];
    span.classList.add("current");
    const named = to - from > 1 ? `tokens ${from} to ${to - 1} ` : `token ${from} `;
    tip.replaceChildren(named, el("code", {}, JSON.stringify(text)), el("br"), describe(drawn[i]));
    const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const width = document.documentElement.clientWidth;
    const above = place.top > tip.offsetHeight + 12;
    tip.style.left = `${scrollX + Math.max(8, Math.min(place.left, width - tip.offsetWidth - 8))}px`;
    tip.style.top = `${scrollY + (above ? place.top - tip.offsetHeight - 6 : place.bottom + 6)}px`;
  }

  const refresh = () => show(current);
  box.addEventListener("pointerover", (event) => show(Number(event.target.dataset.piece ?? -1)));
  // A finger leaves as soon as it has tapped.
  box.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") show(-1); });
  box.addEventListener("scroll", refresh);
  box.addEventListener("blur", () => show(-1));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") show(-1);
    if (!step) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(drawn.length - 1, current + step));
    drawn[next].span.scrollIntoView({ block: "nearest" });
    show(next);
  });
  return { write, refresh };
}

// ---- tables wider than the window say so

const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    target.previousElementSibling.hidden = target.scrollWidth <= target.clientWidth + 1;
  }
});

for (const box of document.querySelectorAll(".scroll")) {
  box.before(el("p", { className: "note", hidden: true }, "← The table scrolls sideways. →"));
  widths.observe(box);
}
