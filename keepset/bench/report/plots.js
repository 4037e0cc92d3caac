// ---- plots

// Packed, plotly is a third as large; the page's security policy knows what comes out by its hash.
const plotly = new TextDecoder().decode(await unpack(id("plotly").textContent));
document.head.append(el("script", { textContent: plotly }));

// Plotly reads labels as a small HTML of its own.
const label = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
const wrapped = (text) => (text.match(/.{1,44}/gsu) ?? []).map(label).join("<br>");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const font = () => ({ family: getComputedStyle(document.body).fontFamily, size: 13, color: css("--ink") });
const axis = (text, more) => ({
  gridcolor: css("--line"), linecolor: css("--line"), zerolinecolor: css("--muted"), automargin: true,
  title: { text, font: font() }, ...more,
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
  box.role = "img";
  box.ariaLabel = told(traces, layout);
  Plotly.react(box, traces, layout, { displayModeBar: false, responsive: true });
}

// The same as words, for readers who do not see it: what stands on the axes, and from where to where each series goes.
function told(traces, { xaxis, yaxis }) {
  const short = (value) => (typeof value === "number" ? Number(value.toPrecision(3)).toLocaleString("en-US") : String(value));
  const lines = traces.filter((trace) => trace.name && trace.visible !== false && trace.x?.length).map(({ name, x, y }) => {
    const points = [...x.keys()].filter((i) => known(y[i]));
    const some = points.length > 12 ? [points[0], points[points.length >> 1], points.at(-1)] : points;
    return `${name}: ${some.map((i) => `${short(y[i])} at ${short(x[i])}`).join(", ")}`;
  });
  return [`Chart of ${yaxis?.title?.text} by ${xaxis?.title?.text}.`, ...lines].join(" ");
}

const onScheme = (draw) => matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// ---- methods: one colour and symbol each

const SYMBOLS = [["circle", "●"], ["square", "■"], ["diamond", "◆"], ["triangle-up", "▲"], ["triangle-down", "▼"]];
const COLOURS = 8;
// Beyond those of the style, hues by the golden angle, so that no two series share one.
const colourOf = (i) => (i < COLOURS ? css(`--c${i}`) : `hsl(${Math.round(137.5 * i) % 360} 60% ${css("--lightness")})`);
const symbolOf = (i) => SYMBOLS[i % SYMBOLS.length][0];

const tint = (i) => (i < COLOURS ? `var(--c${i})` : `hsl(${Math.round(137.5 * i) % 360} 60% var(--lightness))`);

function mark(i) {
  const node = el("span", { className: "mark", ariaHidden: "true" }, SYMBOLS[i % SYMBOLS.length][1]);
  node.style.color = tint(i);
  return node;
}

// One legend for all plots of a section: names, the numbers of their colours, and whether their lines are dashed.
function legends(series) {
  for (const box of document.querySelectorAll(".series")) {
    box.append(...series.map(([name, i, dashed]) => {
      const line = el("span", { className: "stroke" });
      line.style.borderTop = `3px ${dashed ? "dashed" : "solid"} ${tint(i)}`;
      return el("span", { className: "entry" }, line, name);
    }));
  }
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

