// Draws what recipes kept of a text: the share of the chosen heads that keep a token.

const numbered = (values) => values.map((value, i) => [i, String(value)]);

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
  box.append(
    el("p", { id: "share", role: "status" }),
    el("div", { id: "text", tabIndex: 0, role: "region", ariaLabel: "The text" }),
    el("p", { className: "note" }, "Point at a token, or focus the text and press ← or →, to see its index. ↵ marks a line break."),
    el("div", { id: "tip", role: "status", hidden: true }));
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

await show();
