const { budgets, weights, gate, counts, curves } = data;
const layers = weights[0].length;
const tall = `${Math.max(180, Math.min(640, 60 + 14 * layers))}px`;

function header() {
  const heads = weights[0][0].length;
  title(data.model, `The decision tables of ${integer(layers)} layers of ${integer(heads)} query heads, compiled for budgets of ${budgets.map(integer).join(", ")} entries per KV head.`);
  for (const [name, value] of data.facts) id("facts").append(fact(name, value));
}

const chosen = () => Number(id("budget").value);
const few = () => [[0, css("--page")], [1, css("--c0")]];

// From the edges of bins their names: below the first, between two, from the last on.
const bins = (edges) => [`below ${edges[0]}`, ...edges.slice(1).map((edge, i) => `${edges[i]} to ${edge}`), `from ${edges.at(-1)}`];
const ENTROPY = bins(data.entropy_edges), PERPLEXITY = bins(data.perplexity_edges);

function map(box, z, more, x, y) {
  chart(box, [{ type: "heatmap", z, xgap: 1, ygap: 1, colorbar: { thickness: 12, outlinewidth: 0 }, ...more }], {
    xaxis: axis(x, { showgrid: false, zeroline: false, tickformat: "d" }),
    yaxis: axis(y, { showgrid: false, zeroline: false, tickformat: "d", autorange: "reversed" }),
  });
}

function headMap() {
  const z = weights[chosen()];
  const flat = weights.flat(2);
  // Cold below 1, warm above it, as far as the farther of the two ends.
  const far = Math.max(1e-3, ...flat.map((w) => Math.abs(w - 1)));
  id("heads").style.height = tall;
  map(id("heads"), z, {
    zmin: 1 - far, zmax: 1 + far, colorscale: [[0, css("--c0")], [0.5, css("--page")], [1, css("--c1")]],
    hovertemplate: "layer %{y}, head %{x}: %{z}<extra></extra>",
  }, "query head", "layer");
}

const gateBoxes = PERPLEXITY.map((name) => {
  const box = el("div", { className: "plot" });
  id("gate").append(el("figure", {}, el("figcaption", {}, `Perplexity ${name}`), box));
  return box;
});

function gateMaps() {
  gateBoxes.forEach((box, p) => {
    box.style.height = tall;
    map(box, gate[chosen()].map((layer) => layer.map((row) => row[p])), {
      zmin: Math.min(0.8, ...gate.flat(3)), zmax: 1, colorscale: few(), text: gate[0].map(() => ENTROPY),
      hovertemplate: "layer %{y}, entropy %{text}: %{z}<extra></extra>",
    }, "bin of entropy", "layer");
  });
}

function countMap() {
  id("counts").style.height = "200px";
  const z = PERPLEXITY.map((_, p) => counts.map((row) => row[p]));
  map(id("counts"), z, {
    zmin: 0, colorscale: few(), text: PERPLEXITY.map((name) => ENTROPY.map((entropy) => `entropy ${entropy}, perplexity ${name}`)),
    hovertemplate: "%{text}: %{z}<extra></extra>",
  }, "bin of entropy", "bin of perplexity");
}

function learning() {
  id("curves").hidden = !Object.values(curves).some((points) => points.length);
  if (id("curves").hidden) return;
  for (const name of ["bellman", "conservative"]) {
    chart(id(name), Object.entries(curves).map(([table, points], i) => ({
      type: "scatter", mode: "lines", name: table, x: points.map((point) => point.step), y: points.map((point) => point[name]),
      line: { color: css(i ? "--c1" : "--c0"), width: 2, dash: i ? "dash" : "solid" },
      hovertemplate: `step %{x}: %{y:.4f}<extra>${table}</extra>`,
    })), { xaxis: axis("step"), yaxis: axis(name === "bellman" ? "squared error" : "nats") });
  }
}

function paint() {
  headMap();
  gateMaps();
  countMap();
  learning();
}

header();
legends(Object.keys(curves).map((table, i) => [table, i, i > 0]));
budgets.forEach((budget, i) => id("budget").append(el("option", { value: i }, integer(budget))));
id("budget").addEventListener("change", paint);
paint();
onScheme(paint);
