// What the reports and the playground share: elements, numbers, and a text whose tokens are shaded and described.
// Text of users and models goes into the document as text nodes or attributes, never as markup.
const id = (name) => document.getElementById(name);
const data = JSON.parse(id("data").textContent);

function el(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const integer = (value) => value.toLocaleString("en-US");
const percent = (share) => `${(100 * share).toFixed(1)}%`;

// Bytes that the page was given as base64 of gzip.
async function unpack(packed) {
  const zipped = new Blob([Uint8Array.from(atob(packed), (c) => c.charCodeAt(0))]);
  return new Uint8Array(await new Response(zipped.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

const bit = (bytes, i) => (bytes[i >> 3] >> (7 - (i & 7))) & 1;

// Characters that no font has, C1 controls, are shown as HTML shows them: as those of windows-1252, of which they mostly
// are a wrong reading.
const western = new TextDecoder("windows-1252");
const visible = (text) => text.replace(/[\u0080-\u009f]/g, (c) => western.decode(Uint8Array.of(c.charCodeAt(0))));

// Returns the spans to draw: one per token, or per group of tokens that make up one character for a reader.
// A token that only continues the character before it is null.
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

// Draws a text into #text. The piece under the pointer, or reached with the arrow keys, is described in #tip.
function tokenText(describe) {
  const box = id("text"), tip = id("tip");
  let drawn = [], current = -1;

  // An image is a grid of its tokens: `[first token, rows, columns]` of each.
  function write(tokens, grids = []) {
    drawn = pieces(tokens);
    drawn.forEach((piece, i) => {
      piece.span = el("span", { className: /[\n\r]/.test(piece.text) ? "break" : "" }, ...(piece.text ? [visible(piece.text)] : []));
      piece.span.dataset.piece = i;
    });
    current = -1;
    const nodes = [];
    for (const piece of drawn) {
      const number = grids.findIndex(([first, rows, columns]) => piece.from >= first && piece.from < first + rows * columns);
      if (number < 0) nodes.push(piece.span);
      else nodes.push(...patch(piece, grids[number], number, nodes.at(-1)));
    }
    box.replaceChildren(...nodes);
    return drawn;
  }

  // Puts a piece into the grid of its image; returns the grid if the piece is its first.
  function patch(piece, [first, , columns], number, last) {
    const at = piece.from - first, begins = at === 0;
    const image = begins ? el("span", { className: "image", role: "img", ariaLabel: `Image ${number + 1}` }) : last;
    image.style.gridTemplateColumns = `repeat(${columns}, auto)`;
    piece.span.className = "patch";
    piece.span.replaceChildren();
    piece.place = `row ${Math.floor(at / columns) + 1}, column ${at % columns + 1} of image ${number + 1}: `;
    image.append(piece.span);
    return begins ? [image] : [];
  }

  function show(i) {
    drawn[current]?.span.classList.remove("current");
    current = i;
    tip.hidden = i < 0;
    if (i < 0) return;
    const { span, from, to, text } = drawn[i];
    span.classList.add("current");
    const placed = drawn[i].place ?? "";
    const named = to - from > 1 ? `tokens ${from} to ${to - 1} ` : `token ${from} `;
    tip.replaceChildren(named, el("code", {}, JSON.stringify(text)), el("br"), placed, describe(drawn[i]));
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

// Shades a piece by the share of heads that keep it.
function shadeBy(span, share) {
  span.style.setProperty("--share", share.toFixed(4));
  span.classList.toggle("dropped", share === 0);
}

// Fills the legend's scale with eleven shades, from no head to all heads.
function fillScale() {
  for (let i = 0; i <= 10; i++) {
    const step = el("span");
    step.style.setProperty("--share", i / 10);
    id("scale").append(step);
  }
}
